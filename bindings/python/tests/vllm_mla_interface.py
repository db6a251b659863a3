"""A stand-in for the parts of vLLM's interface of latent attention that `fa3.vllm.mla` and `fa3.vllm.mla_sparse` use,
for machines without vLLM. If vLLM is installed, a test compares the two.
"""

import sys
from abc import abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
import vllm_interface
from vllm_interface import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder

T = TypeVar("T")


class QueryLenSupport(Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonBackend(AttentionBackend):
    @classmethod
    def get_supported_head_sizes(cls):
        return [320, 512, 576]

    @classmethod
    def is_mla(cls):
        return True


@dataclass
class MLACommonDecodeMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


@dataclass
class MLACommonMetadata(AttentionMetadata, Generic[T]):
    decode: Any = None


class MLACommonMetadataBuilder(AttentionMetadataBuilder[T]):
    reorder_batch_threshold = 1

    def __init__(
        self, kv_cache_spec, layer_names, vllm_config, device, metadata_cls=None, supports_dcp_with_varlen=False
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.metadata_cls = metadata_cls

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        raise NotImplementedError


class MLACommonImpl(AttentionImpl[T]):
    need_to_return_lse_for_decode = False

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap,
        attn_type,
        kv_sharing_target_layer_name,
        q_lora_rank,
        kv_lora_rank,
        qk_nope_head_dim,
        qk_rope_head_dim,
        qk_head_dim,
        v_head_dim,
        kv_b_proj,
        indexer=None,
        q_pad_num_heads=None,
    ):
        self.num_heads, self.scale, self.kv_lora_rank = num_heads, scale, kv_lora_rank

    def forward(self, *arguments):
        raise NotImplementedError

    @abstractmethod
    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): ...


class MLAPrefillBackend:
    def __init__(
        self, num_heads, scale, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, vllm_config
    ):
        self.scale = scale

    def prepare_metadata(self, prefill_metadata):
        self._prefill_metadata = prefill_metadata


class MLAPrefillBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.mla.prefill.flash_attn.FlashAttnPrefillBackend"

    def is_overridden(self):
        return self in vllm_interface._OVERRIDES

    def get_path(self):
        return vllm_interface._OVERRIDES[self]

    def clear_override(self):
        vllm_interface._OVERRIDES.pop(self, None)


def register_mla_prefill_backend(backend, class_path=None):
    vllm_interface._OVERRIDES[backend] = class_path


@dataclass
class SparseMLACommonMetadata(MLACommonMetadata[MLACommonDecodeMetadata]):
    pass


class SparseMLACommonMetadataBuilder(AttentionMetadataBuilder[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def _init_reorder_batch_threshold(
        self, reorder_batch_threshold=1, supports_spec_as_decode=False, supports_dcp_with_varlen=False
    ):
        self.reorder_batch_threshold = reorder_batch_threshold

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        raise NotImplementedError


class SparseMLACommonImpl(MLACommonImpl[T]):
    def __init__(self, *arguments, indexer=None, topk_indices_buffer=None, **named):
        super().__init__(*arguments, **named)
        self.topk_indices_buffer = topk_indices_buffer

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        raise NotImplementedError


def align_blocks_to_rows(spec, rows=1):
    return spec


def flat_kv_row_view(kv_cache, block_size):
    """Views a cache as one list of rows, including rows between its blocks. Also returns the number of rows from the
    start of one block to the start of the next.
    """
    blocks, _, columns = kv_cache.shape
    distance = kv_cache.stride(0) // columns
    return kv_cache.as_strided(((blocks - 1) * distance + block_size, columns), (columns, 1)), distance


def install(monkeypatch):
    """Makes `import vllm` find the names of this module and of `vllm_interface`."""
    vllm_interface.install(monkeypatch)
    names = "vllm.v1.attention.backends.mla vllm.v1.attention.backends.mla.prefill"
    names += " vllm.v1.attention.backends.mla.prefill.base vllm.v1.attention.backends.mla.prefill.registry"
    names += " vllm.v1.attention.backends.mla.sparse_utils vllm.model_executor vllm.model_executor.layers"
    names += " vllm.model_executor.layers.attention vllm.model_executor.layers.attention.mla_attention"
    names += " vllm.model_executor.layers.attention.sparse_mla_attention"
    for name in names.split():
        module = ModuleType(name)
        module.__dict__.update({x: y for x, y in globals().items() if not x.startswith("__")})
        monkeypatch.setitem(sys.modules, name, module)
        outer, _, inner = name.rpartition(".")
        setattr(sys.modules[outer], inner, module)
