"""What the streaming kernel's PTX does, for the emulator, and a runner that emulates every launch."""

import torch

from mjolnir.kernels import fragments, wgmma
from mjolnir.kernels.stream_runner import StreamRunner
from tests.kernels.gluon_emulator import emulate


def _four_halves(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    codes = words.contiguous().view(torch.uint8).view(*words.shape, 4).view(torch.float8_e4m3fn)
    return tuple(codes[..., byte].half() for byte in range(4))


def _e4m3_words(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Byte by byte, from the format's definition: three codes in place, the fourth in the bits that they leave free."""
    planes = [word.contiguous().view(torch.uint8) for word in (a, b, c)]
    spare = [(plane >> 5) & 3 for plane in planes]
    fourth = (spare[0] << 3) | (spare[1] << 1) | (spare[2] & 1) | ((spare[2] >> 1) << 7)
    return tuple(code.view(torch.int32) for code in (*(plane & 0x9F for plane in planes), fourth))


def _transposed_blocks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    warps, rows, columns = x.shape
    blocks = x.view(warps, rows // 8, 8, columns // 8, 8)
    return (blocks.transpose(2, 4).reshape(x.shape),)


def _channels_apart(pairs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    codes = pairs.contiguous().view(torch.uint8).view(*pairs.shape, 2).view(torch.float8_e4m3fn)
    return codes[..., 0].half(), codes[..., 1].half()


emulate.register_asm(fragments.E4M3_TO_F16, _four_halves)
emulate.register_asm(fragments.E2M3_TO_E4M3, _e4m3_words)
emulate.register_asm(fragments.TRANSPOSE_8X8, _transposed_blocks)
emulate.register_asm(wgmma.CHANNELS_APART, _channels_apart)


def emulated_runner(config, *, num_sms=None, tuning=None) -> StreamRunner:
    """A `StreamRunner` on the CPU."""

    def launch(variant, grid, arguments):
        emulate(variant.kernel, grid, *arguments, num_warps=variant.num_warps, **dict(variant.constants))

    return StreamRunner(config, num_sms=num_sms, tuning=tuning, launch=launch)
