"""A stand-in for the parts of vLLM's interface of attention backends that `fa3.vllm` uses, for machines without vLLM.
If vLLM is installed, a test compares the two.
"""

import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import ModuleType
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend(ABC):
    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def customize_spec(cls, spec):
        return spec

    @classmethod
    def supports_head_size(cls, head_size):
        return True

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_mm_prefix(cls):
        return False

    @classmethod
    def supports_per_head_quant_scales(cls):
        return False

    @classmethod
    def supports_sliding_window(cls):
        return False

    @classmethod
    def supports_non_causal(cls):
        return False

    @classmethod
    def supports_batch_invariance(cls):
        return False

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability):
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size,
        dtype,
        kv_cache_dtype,
        block_size,
        use_mla,
        has_sink,
        use_sparse,
        use_mm_prefix,
        device_capability,
    ):
        return None


# A variable of vLLM's environment.
VLLM_BATCH_INVARIANT = False


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadataBuilder(ABC, Generic[T]):
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False
    supports_draft_decode_metadata_update = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return cls._cudagraph_support

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def update_block_table(self, metadata, blk_table, slot_mapping):
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def update_draft_decode_metadata(self, metadata):
        raise NotImplementedError


class AttentionImpl(ABC, Generic[T]):
    @abstractmethod
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ): ...

    @abstractmethod
    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ): ...


class AttentionBackendEnum(Enum):
    FLASH_ATTN_MLA = "vllm.v1.attention.backends.mla.flashattn_mla.FlashAttnMLABackend"
    FLASH_ATTN_MLA_SPARSE = "vllm.v1.attention.backends.mla.flashattn_mla_sparse.FlashAttnMLASparseBackend"
    CUSTOM = None

    def is_overridden(self):
        return self in _OVERRIDES

    def get_path(self):
        return _OVERRIDES[self]

    def clear_override(self):
        _OVERRIDES.pop(self, None)


_OVERRIDES = {}


def register_backend(backend, class_path=None, is_mamba=False):
    _OVERRIDES[backend] = class_path


class DeviceCapability(tuple):
    def __new__(cls, major, minor):
        return super().__new__(cls, (major, minor))


class KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3

    @property
    def is_per_token_head(self):
        return self in (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD)


def get_kv_quant_mode(kv_cache_dtype):
    if kv_cache_dtype.endswith("per_token_head"):
        return KVQuantMode[kv_cache_dtype.upper()]
    return KVQuantMode(kv_cache_dtype.startswith("fp8"))


def is_quantized_kv_cache(kv_cache_dtype):
    return get_kv_quant_mode(kv_cache_dtype) != KVQuantMode.NONE


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The parts of a layer's cache: a token and head has state_content_bytes, or as many as K and V have."""

    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    state_content_bytes: int | None = None


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """vLLM's kernel of that name, in torch: rows of keys and values go to the slots of a cache. The number of slots
    counts, and rows with negative slots go nowhere.
    """
    used = slot_mapping >= 0
    page, row = slot_mapping[used] // key_cache.shape[1], slot_mapping[used] % key_cache.shape[1]
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        new = new[: len(slot_mapping)][used]
        if is_quantized_kv_cache(kv_cache_dtype):
            new = (new / scale.view(-1, 1)).to(torch.float8_e4m3fn).view(cache.dtype)
        cache[page, row] = new


def triton_reshape_and_cache_flash_per_token_head_quant(
    key, value, key_cache, value_cache, k_scale_cache, v_scale_cache, slot_mapping, kv_quant_mode
):
    """vLLM's kernel of that name, in torch: a row of a head is divided by its own scale, which goes to its slot, too.
    The number of rows counts.
    """
    assert kv_quant_mode.is_per_token_head
    used = slot_mapping[: len(key)] >= 0
    slots = slot_mapping[: len(key)][used]
    page, row = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for new, cache, scales in ((key, key_cache, k_scale_cache), (value, value_cache, v_scale_cache)):
        new = new[used].float()
        largest = 127.0 if cache.dtype == torch.int8 else 448.0
        scale = (new.abs().amax(-1) / largest).clamp(min=1e-6)
        scales[page, row] = scale
        codes = new * (1.0 / scale[..., None])
        if cache.dtype == torch.int8:
            # Half of an integer is rounded away from 0.
            codes = torch.where(codes >= 0, codes + 0.5, codes - 0.5).trunc()
        # Torch's CPU puts no float8 to places that a tensor lists.
        codes = codes.clamp(-largest, largest).to(cache.dtype)
        cache.view(torch.uint8)[page, row] = codes.view(torch.uint8)


def compute_on_the_cpu():
    """Makes vLLM use its CPU platform. Without a GPU, a vLLM built for GPUs finds no platform, and layers need one."""
    platforms = importlib.import_module("vllm.platforms")
    platforms._current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()


def install(monkeypatch):
    """Makes `import vllm` find this module's names."""
    names = "vllm vllm._custom_ops vllm.platforms vllm.platforms.interface vllm.v1 vllm.v1.attention"
    names += " vllm.v1.attention.backend vllm.v1.attention.backends vllm.v1.attention.backends.registry"
    names += " vllm.v1.kv_cache_interface vllm.envs vllm.v1.attention.ops"
    names += " vllm.v1.attention.ops.triton_reshape_and_cache_flash"
    for name in names.split():
        module = ModuleType(name)
        module.__dict__.update({x: y for x, y in globals().items() if not x.startswith("__")})
        monkeypatch.setitem(sys.modules, name, module)
        outer, _, inner = name.rpartition(".")
        if outer:
            setattr(sys.modules[outer], inner, module)
    sys.modules["vllm"].__version__ = "0.33.0"
