"""A window's size is a number that a kernel reads: other sizes need no other version of the generation step."""

from tests.support.versions import versions_of


def test_windows_share_one_version():
    """768 is a multiple of 16, and 1 is 1: Triton specialises such numbers where it may. No window is another call."""
    assert versions_of("decode", 777, 768, 1) == {"decode_kernel": 1, "combine_kernel": 1}
    assert versions_of("decode", 777, -1)["decode_kernel"] == 2
