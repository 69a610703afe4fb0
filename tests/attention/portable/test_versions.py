"""A window's size is a number that a kernel reads: other sizes need no other version of the forward pass."""

from tests.support.versions import versions_of


def test_windows_share_one_version():
    """768 is a multiple of 16, and 1 is 1: Triton specialises such numbers where it may. No window is another call."""
    assert versions_of("attend", 777, 768, 1) == {"prepass_kernel": 1, "forward_kernel": 1}
    assert versions_of("attend", 777, -1)["forward_kernel"] == 2
