"""Types of GPUs, one row each, and which GPUs nobody but the site can mend."""

from __future__ import annotations

from hpcddp.record import Record

#: What nvidia-smi reports on rows and pages of a GPU's memory, and the line, for Python and `grep -E`, of a GPU that
#: needs a reset. A driver that has no such line is no fault.
MEMORY_REPORT = ("nvidia-smi", "-q", "-d", "ROW_REMAPPER,PAGE_RETIREMENT")
NEEDS_RESET = "(Pending( Page [A-Za-z]+)?|Remapping Failure Occurred) *: Yes"


class GpuType(Record):
    """`part`: of the name that its driver or a site gives it. `arch`: as builds of torch call it. `tflops`, `gbs`: of a
    dense product in 16 bits, and of its memory, as its maker says."""

    part: str
    arch: str
    tflops: int
    gbs: int


#: https://www.nvidia.com/en-us/data-center/, https://www.amd.com/en/products/accelerators/instinct.html; of a type with
#: several sizes the slowest memory. The first row whose part is in a name is that of the name.
GPU_TYPES = (
    GpuType("B200", "sm_100", 2250, 8000),
    GpuType("GH200", "sm_90", 989, 4000),
    GpuType("H200", "sm_90", 989, 4800),
    GpuType("H100 PCIe", "sm_90", 756, 2000),
    GpuType("H100 NVL", "sm_90", 835, 3900),
    GpuType("H100", "sm_90", 989, 3350),
    GpuType("A100", "sm_80", 312, 1555),
    GpuType("A30", "sm_80", 165, 933),
    GpuType("A40", "sm_86", 150, 696),
    GpuType("A10", "sm_86", 125, 600),
    GpuType("L40S", "sm_89", 362, 864),
    GpuType("L40", "sm_89", 181, 864),
    GpuType("L4", "sm_89", 121, 300),
    GpuType("V100", "sm_70", 125, 900),
    GpuType("MI300", "", 1307, 5300),
    GpuType("MI250", "", 191, 1638),  # half of a card, which is one device
)


def find_gpu_type(name: str) -> GpuType | None:
    """The type of a GPU with this name; None: none that is known."""
    return next((row for row in GPU_TYPES if row.part in name), None)
