"""`tools.uninitialised` finds a register that is read before it is written, and nothing else."""

import pytest

from tools.uninitialised import reads_of_nothing

# Shortened from the forward kernel of 32 columns, interleaved, that ptxas 12.8 made: UR34 and UR35 have no value.
LOST = """
        /*0000*/                   UMOV UR28, 0x400 ;
        /*0010*/                   ULDC.64 UR32, c[0x0][0x208] ;
        /*0020*/               @P4 BRA `(.L_x_0) ;
        /*0030*/                   UIADD3 UR34, UP0, UR34, 0x40, URZ ;
        /*0040*/                   UIADD3.X UR35, UR35, -0x7fffffe0, URZ, UP0, !UPT ;
.L_x_1:
        /*0050*/              @!P2 LDG.E.U16 R50, desc[UR32][R96.64] ;
        /*0060*/                   HGMMA.64x32x16.F32 R56, R28, gdesc[UR32].tnspB, R56 ;
        /*0070*/              @!P2 BRA `(.L_x_1) ;
.L_x_0:
        /*0080*/                   EXIT ;
"""
KEPT = LOST.replace(
    "        /*0030*/",
    "        /*0028*/                   R2UR UR34, R100 ;\n"
    "        /*002c*/                   UMOV UR35, URZ ;\n        /*0030*/",
)


def test_a_lost_register_is_found():
    assert list(reads_of_nothing(LOST)) == [("0030", "UIADD3", [34]), ("0040", "UIADD3.X", [35])]
    assert list(reads_of_nothing(KEPT)) == [], "code that writes first is clean"


@pytest.mark.parametrize(
    ("line", "registers"),
    [
        ("HGMMA.64x64x16.F32 R24, gdesc[UR36], R24, gsb0", [36, 37, 38, 39]),  # two descriptors
        ("HGMMA.64x64x16.F32 R24, R76, gdesc[UR36].tnspB, RZ, !UPT", [38, 39]),  # one, the other operand is in R76
        ("LDG.E R2, desc[UR8][R4.64]", [8, 9]),
        ("USEL UR4, UR5, URZ, !UP0", [5]),
        ("STS [UR6], R3", [6]),
        ("UISETP.GT.AND UP0, UPT, UR43, 0x1, UPT", [43]),
    ],
)
def test_what_instructions_read(line, registers):
    sass = f"        /*0000*/                   {line} ;\n        /*0010*/                   EXIT ;\n"
    assert [found[2] for found in reads_of_nothing(sass)] == [registers]


def test_a_write_on_one_of_two_paths_is_not_enough():
    branch = """
        /*0000*/               @P0 BRA `(.L_x_0) ;
        /*0010*/                   UMOV UR4, 0x1 ;
.L_x_0:
        /*0020*/                   STS [UR4], R3 ;
        /*0030*/                   EXIT ;
"""
    assert list(reads_of_nothing(branch)) == [("0020", "STS", [4])]
