import pytest

from appliance.rootcause import RootCause, find

API = "(APIServer pid=10) "
WRAPPER = f"""\
{API}Traceback (most recent call last):
{API}  File "entry.py", line 1, in main
{API}    run()
{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': 1}}
"""


def traceback(process: str, *last: str) -> str:
    prefix = f"({process} pid=7) ERROR 12-01 04:06:58 [core.py:9] "
    lines = ["Traceback (most recent call last):", '  File "x.py", line 3, in f', "    f()", "    ^^^", *last]
    return "".join(f"{prefix}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", None),
        ("INFO fine\n", None),
        (WRAPPER, None),
        (
            traceback("Worker", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB") + WRAPPER,
            RootCause("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        ),
        (
            traceback("EngineCore", "ValueError: No tokenizer found") + traceback("APIServer", "KeyError: 'later'"),
            RootCause("ValueError: No tokenizer found", settings=True),
        ),
        (
            traceback("EngineCore", "ValueError: Free memory on device (3/122 GiB) is less than desired") + WRAPPER,
            RootCause("ValueError: Free memory on device (3/122 GiB) is less than desired"),
        ),
        (
            f"{API}Traceback (most recent call last):\n{API}  File \"a\", line 1\n"
            f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            f"{API}  Value error, max_model_len (9) is too large [type=value_error, input_value=..., input_type=X]\n",
            RootCause("ValidationError: max_model_len (9) is too large", settings=True),
        ),
        (
            # Lines of another process between those of the traceback.
            "(Worker pid=1) Traceback (most recent call last):\n(Other pid=2) Boom: not this\n"
            "(Worker pid=1)   File \"x\", line 1\n(Worker pid=1) mjolnir.errors.KernelError: this one\n",
            RootCause("KernelError: this one"),
        ),
        ("vllm serve: error: unrecognized arguments: --x\n", RootCause("unrecognized arguments: --x", settings=True)),
        ("terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error\n",
         RootCause("terminate called after throwing an instance of 'c10::Error'")),
        (
            "(APIServer pid=1) WARNING 12-01 04:28:16 [core_client.py:817] engine core exited unexpectedly\n"
            + traceback("APIServer", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."),
            RootCause("engine core exited unexpectedly"),
        ),
        (
            "Traceback (most recent call last):\n  File \"x\"\nValueError: " + "y" * 900,
            RootCause("ValueError: " + "y" * 387 + "…", settings=True),
        ),
        ("Traceback (most recent call last):\n  File \"x\"\n", None),
    ],
)  # fmt: skip
def test_the_first_exception_that_tells_something(log, expected):
    assert find(log.splitlines()) == expected
