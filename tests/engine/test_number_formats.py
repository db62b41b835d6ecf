import pytest

from chatd.engine.number_formats import NumberFormats, formats_for_cpu, formats_for_gpu
from chatd.engine.options import EngineOptions
from chatd.errors import ConfigError


def options(**fields):
    return EngineOptions(model_id="m", model_path="/m", model_digest="d", **fields)


def on_gpu(stored="bfloat16", has_bfloat16=True, **fields):
    return formats_for_gpu(options(**fields), stored, has_bfloat16=has_bfloat16)


def test_the_cpu_computes_in_32_bits_and_keeps_weights_and_kv_in_16():
    assert formats_for_cpu(options()) == NumberFormats("float32", "float16", "fp16")
    asked = options(quantization="int8", kv_dtype="float32", dtype="float32")
    assert formats_for_cpu(asked) == NumberFormats("float32", "float32", "int8")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"kv_dtype": "int8"}, "model.kv_dtype", "kv_dtype is int8, on the CPU it is one of float16, float32"),
        ({"kv_dtype": "fp8"}, "model.kv_dtype", "kv_dtype is fp8"),
        ({"quantization": "bf16"}, "model.quantization", "quantization is bf16, on the CPU it is one of"),
        ({"dtype": "bfloat16"}, "model.dtype", "dtype is bfloat16, the CPU computes in float32"),
    ],
)
def test_what_the_cpu_has_no_kernels_for_is_refused_by_name(fields, param, message):
    with pytest.raises(ConfigError, match=message) as caught:
        formats_for_cpu(options(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("stored", "has_bfloat16", "dtype"),
    [
        ("bfloat16", True, "bfloat16"),
        ("float16", True, "float16"),
        ("float32", True, "bfloat16"),
        (None, True, "bfloat16"),
        ("bfloat16", False, "float16"),
    ],
)
def test_a_gpu_takes_the_makers_format_in_16_bits(stored, has_bfloat16, dtype):
    formats = on_gpu(stored, has_bfloat16)
    assert (formats.dtype, formats.kv_dtype) == (dtype, dtype)


def test_a_format_that_was_asked_for_by_the_weights_name_is_that_of_everything():
    assert on_gpu(quantization="fp16") == NumberFormats("float16", "float16", "fp16")
    assert on_gpu(quantization="fp32") == NumberFormats("float32", "float32", "fp32")
    assert on_gpu(quantization="int8", kv_dtype="fp8") == NumberFormats("bfloat16", "fp8", "int8")
    assert on_gpu(dtype="float16", kv_dtype="int8") == NumberFormats("float16", "int8", "fp16")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dtype": "float16", "quantization": "bf16"}, "model.quantization"),
        ({"dtype": "bfloat16", "kv_dtype": "float16"}, "model.kv_dtype"),
        ({"dtype": "bfloat16", "has_bfloat16": False}, "model.dtype"),
        ({"quantization": "bf16", "has_bfloat16": False}, "model.dtype"),
    ],
)
def test_formats_that_do_not_go_together_on_a_gpu_are_refused_by_name(fields, param):
    with pytest.raises(ConfigError) as caught:
        on_gpu(**fields)
    assert caught.value.param == param
