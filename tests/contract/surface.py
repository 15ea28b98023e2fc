"""What the plugin leans on in vLLM, read off vLLM's source without importing it.

`NEEDED` lists, file by file and class by class ("" for the module itself), the methods with the
parameters they are called with, and the fields that are read. `record` finds them in a source
tree; `missing` says what a recorded surface lacks. Record a release with::

    python -m tests.contract.surface SITE_PACKAGES VERSION
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("surfaces")
Surface = dict[str, dict[str, dict[str, Any]]]

NEEDED: dict[str, dict[str, dict[str, list[str] | None]]] = {
    # A list: a function that takes these parameters. None: a field, constant or property.
    "vllm/plugins/__init__.py": {"": {"load_general_plugins": []}},
    "vllm/engine/arg_utils.py": {
        "EngineArgs": {"create_engine_config": ["self"], "disable_log_stats": None}
    },
    "vllm/v1/worker/worker_base.py": {
        "WorkerWrapperBase": {
            "__getattr__": ["self", "attr"],
            "vllm_config": None,
            "worker": None,
            "execute_model": ["self", "scheduler_output"],
            "shutdown": ["self"],
        }
    },
    "vllm/v1/worker/gpu_worker.py": {
        "Worker": {
            "load_model": ["self", "load_dummy_weights"],
            "init_snapshot": None,
            "compile_or_warm_up_model": ["self"],
            "get_model": ["self"],
            "sample_tokens": ["self", "grammar_output"],
            "reload_weights": ["self"],
            "start_weight_update": ["self"],
            "update_weights": ["self", "update_info"],
        }
    },
    "vllm/model_executor/offloader/base.py": {
        "": {"get_offloader": [], "set_offloader": ["instance"]},
        "BaseOffloader": {
            "wrap_modules": ["self", "modules_generator"],
            "post_init": ["self"],
            "sync_prev_onload": ["self"],
            "join_after_forward": ["self"],
            "_wait_for_layer": ["self", "layer_idx"],
            "_start_prefetch": ["self", "layer_idx"],
        },
        "NoopOffloader": {"wrap_modules": ["self", "modules_generator"]},
    },
    "vllm/model_executor/offloader/prefetch_ops.py": {
        "": {
            "_wait_prefetch_impl": ["input_tensor", "layer_idx"],
            "_start_prefetch_impl": ["output_tensor", "layer_idx"],
        }
    },
    "vllm/model_executor/models/utils.py": {
        "": {"make_layers": ["num_hidden_layers", "layer_fn", "prefix"]}
    },
    "vllm/model_executor/layers/linear.py": {
        "UnquantizedLinearMethod": {"process_weights_after_loading": ["self", "layer"]}
    },
    "vllm/v1/core/sched/output.py": {
        "SchedulerOutput": {"total_num_scheduled_tokens": None, "scheduled_cached_reqs": None},
        "CachedRequestData": {"req_ids": None},
    },
    "vllm/v1/outputs.py": {"AsyncModelRunnerOutput": {"get_output": ["self"]}},
    "vllm/model_executor/custom_op.py": {
        "": {"op_registry_oot": None},
        "PluggableLayer": {"__new__": ["cls"]},
    },
    "vllm/model_executor/layers/fused_moe/routed_experts.py": {
        "RoutedExperts": {
            "__init__": ["self", "layer_name", "params_dtype", "moe_config", "quant_config"],
            "weight_loader": [
                "self",
                "param",
                "loaded_weight",
                "weight_name",
                "shard_id",
                "expert_id",
                "return_success",
            ],
            "_expert_map": None,
            "local_num_experts": None,
            "_get_quant_method": ["self", "prefix", "quant_config", "moe_config"],
            "forward_modular": [
                "self",
                "x",
                "topk_weights",
                "topk_ids",
                "shared_experts",
                "shared_experts_input",
            ],
            "layer_name": None,
            "moe_config": None,
            "params_dtype": None,
            "quant_method": None,
            "top_k": None,
            "global_num_experts": None,
            "apply_router_weight_on_input": None,
            "swiglu_limit": None,
            "swiglu_alpha": None,
            "swiglu_beta": None,
        }
    },
    "vllm/model_executor/layers/fused_moe/runner/moe_runner.py": {
        "MoERunner": {"routed_experts": None, "router": None}
    },
    "vllm/model_executor/layers/fused_moe/config.py": {
        "FusedMoEConfig": {
            "num_experts": None,
            "num_local_experts": None,
            "experts_per_token": None,
            "in_dtype": None,
            "hidden_dim": None,
            "intermediate_size_per_partition": None,
            "activation": None,
            "has_bias": None,
        }
    },
    "vllm/model_executor/layers/fused_moe/fused_moe_method_base.py": {
        "FusedMoEMethodBase": {
            "is_monolithic": None,
            "moe": None,
            "moe_kernel": None,
            "moe_quant_config": None,
        }
    },
    "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py": {
        "UnquantizedFusedMoEMethod": {
            "unquantized_backend": None,
            "experts_cls": None,
            "process_weights_after_loading": ["self", "layer"],
            "apply": [
                "self",
                "layer",
                "x",
                "topk_weights",
                "topk_ids",
                "shared_experts",
                "shared_experts_input",
            ],
        }
    },
    "vllm/model_executor/layers/quantization/__init__.py": {
        "": {"register_quantization_config": ["quantization"]}
    },
    "vllm/model_executor/layers/quantization/base_config.py": {
        "QuantizationConfig": {
            "get_name": ["self"],
            "get_supported_act_dtypes": ["self"],
            "get_min_capability": ["cls"],
            "get_config_filenames": [],
            "from_config": ["cls", "config"],
            "get_quant_method": ["self", "layer", "prefix"],
        }
    },
    "vllm/model_executor/models/registry.py": {
        "_ModelRegistry": {"register_model": ["self", "model_arch", "model_cls"]}
    },
    "vllm/model_executor/models/qwen3_moe.py": {
        "Qwen3MoeForCausalLM": {"__init__": ["self", "vllm_config", "prefix"]}
    },
    "vllm/model_executor/layers/fused_moe/__init__.py": {
        "": {"override_config": ["config"], "get_config": []}
    },
    "vllm/model_executor/layers/fused_moe/fused_moe.py": {
        "": {
            "try_get_optimal_moe_config": [
                "w1_shape",
                "w2_shape",
                "top_k",
                "dtype",
                "M",
                "block_shape",
            ]
        }
    },
    "vllm/model_executor/layers/fused_moe/modular_kernel.py": {
        "FusedMoEKernel": {"fused_experts": None}
    },
    "vllm/model_executor/layers/quantization/fp8.py": {
        "Fp8MoEMethod": {
            "process_weights_after_loading": ["self", "layer"],
            "block_quant": None,
        }
    },
    "vllm/model_executor/model_loader/weight_utils.py": {
        "": {"initialize_single_dummy_weight": ["param"]}
    },
    "vllm/model_executor/model_loader/utils.py": {
        "": {"device_loading_context": ["module", "target_device"]}
    },
    "vllm/model_executor/layers/fused_moe/router/routing_simulator_router.py": {
        "RoutingStrategy": {
            "route_tokens": ["self", "hidden_states", "router_logits", "top_k", "indices_type"]
        },
        "RoutingSimulator": {"register_strategy": ["cls", "name", "strategy"]},
        "RoutingSimulatorRouter": {"_compute_routing": ["self", "hidden_states", "router_logits"]},
    },
    "vllm/model_executor/layers/fused_moe/router/base_router.py": {
        "BaseRouter": {"top_k": None, "global_num_experts": None}
    },
    "vllm/forward_context.py": {
        "": {"get_forward_context": [], "is_forward_context_available": []},
        "ForwardContext": {
            "no_compile_layers": None,
            "slot_mapping": None,
            "attn_metadata": None,
            "cudagraph_runtime_mode": None,
        },
    },
    # Backends that say where the rows of each request are; with others nothing is kept.
    "vllm/v1/attention/backends/flash_attn.py": {
        "FlashAttentionMetadata": {"query_start_loc": None}
    },
    "vllm/v1/attention/backends/triton_attn.py": {
        "TritonAttentionMetadata": {"query_start_loc": None}
    },
    "vllm/v1/attention/backends/cpu_attn.py": {"CPUAttentionMetadata": {"query_start_loc": None}},
    "vllm/config/parallel.py": {
        "ParallelConfig": {
            "enable_expert_parallel": None,
            "enable_eplb": None,
            "use_ubatching": None,
            "tensor_parallel_size": None,
            "pipeline_parallel_size": None,
            "prefill_context_parallel_size": None,
            "data_parallel_size": None,
        }
    },
    "vllm/config/model.py": {
        "ModelConfig": {
            "enable_sleep_mode": None,
            "quantization": None,
            "architectures": None,
            "get_hidden_size": ["self"],
            "get_vocab_size": ["self"],
            "get_head_size": ["self"],
            "get_num_kv_heads": ["self", "parallel_config"],
            "get_num_layers": ["self", "parallel_config"],
            "get_num_experts": ["self"],
            "use_mla": None,
        }
    },
    "vllm/platforms/interface.py": {"Platform": {"is_cpu": ["self"], "is_cuda": ["self"]}},
    "vllm/config/cache.py": {
        "CacheConfig": {"gpu_memory_utilization": None, "kv_cache_memory_bytes": None}
    },
    "vllm/config/load.py": {"LoadConfig": {"load_format": None}},
    "vllm/config/offload.py": {
        "UVAOffloadConfig": {"cpu_offload_gb": None},
        "PrefetchOffloadConfig": {"offload_group_size": None},
        "OffloadConfig": {"uva": None, "prefetch": None},
    },
    "vllm/config/vllm.py": {
        "VllmConfig": {
            "additional_config": None,
            "lora_config": None,
            "offload_config": None,
            "parallel_config": None,
            "model_config": None,
            "scheduler_config": None,
            "speculative_config": None,
            "compilation_config": None,
        },
        "": {"set_current_vllm_config": ["vllm_config"], "get_current_vllm_config_or_none": []},
    },
    "vllm/config/compilation.py": {
        "CompilationConfig": {
            "static_forward_context": None,
            "mode": None,
            "cudagraph_mode": None,
            "cudagraph_capture_sizes": None,
            "max_cudagraph_capture_size": None,
        },
        "CUDAGraphMode": {"NONE": None, "PIECEWISE": None},
        "CompilationMode": {"NONE": None},
    },
    "vllm/model_executor/layers/mamba/abstract.py": {"MambaBase": {"get_state_shape": ["self"]}},
    "vllm/config/scheduler.py": {"SchedulerConfig": {"max_num_batched_tokens": None}},
    "vllm/config/speculative.py": {
        "SpeculativeConfig": {"draft_model_config": None, "method": None}
    },
}
# Names that must not be there: the plugin adds them and would hide vLLM's own.
ABSENT = {
    "vllm/v1/worker/worker_base.py": {
        "WorkerWrapperBase": ["load_model", "compile_or_warm_up_model", "sample_tokens"]
    }
}


def record(site_packages: Path) -> Surface:
    """The needed (and the unwanted) names that this source tree has."""
    surface: Surface = {}
    for file, classes in NEEDED.items():
        path = site_packages / file
        tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
        surface[file] = {}
        for owner, names in classes.items():
            wanted = {*names, *ABSENT.get(file, {}).get(owner, [])}
            body = tree.body if not owner else _class_body(tree, owner)
            found = _definitions(body)
            surface[file][owner] = {name: found[name] for name in sorted(wanted & set(found))}
    return surface


def missing(surface: Surface) -> list[str]:
    """What is needed and not there, and what is there and must not be."""
    problems = []
    for file, classes in NEEDED.items():
        for owner, names in classes.items():
            found = surface.get(file, {}).get(owner, {})
            for name, parameters in names.items():
                where = f"{file}: {owner}.{name}"
                if name not in found:
                    problems.append(f"{where} is not there")
                elif parameters is not None and found[name] is not None:
                    lacking = [p for p in parameters if p not in found[name]]
                    if lacking and not any(p.startswith("*") for p in found[name]):
                        problems.append(f"{where} takes {found[name]}, not {lacking}")
    for file, unwanted in ABSENT.items():
        for owner, absent in unwanted.items():
            problems += [
                f"{file}: {owner}.{name} is there now"
                for name in absent
                if name in surface.get(file, {}).get(owner, {})
            ]
    return problems


def _class_body(tree: ast.Module, name: str) -> list[ast.stmt]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    return []


def _definitions(body: list[ast.stmt]) -> dict[str, list[str] | None]:
    """Functions with their parameters; as None properties, constants and what ``self`` is given."""
    found: dict[str, list[str] | None] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_property = any(
                isinstance(d, ast.Name) and d.id in ("property", "cached_property")
                for d in node.decorator_list
            )
            found[node.name] = None if is_property else _parameters(node.args)
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "self"
                ):
                    found.setdefault(inner.attr, None)
                if (
                    isinstance(inner, ast.Call)
                    and isinstance(inner.func, ast.Attribute)
                    and inner.func.attr == "register_buffer"
                    and isinstance(inner.args[0], ast.Constant)
                ):
                    found.setdefault(str(inner.args[0].value), None)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = None
        elif isinstance(node, ast.Assign):
            found.update({t.id: None for t in node.targets if isinstance(t, ast.Name)})
    return found


def _parameters(arguments: ast.arguments) -> list[str]:
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if arguments.vararg:
        names.append("*" + arguments.vararg.arg)
    if arguments.kwarg:
        names.append("**" + arguments.kwarg.arg)
    return names


if __name__ == "__main__":
    root, version = Path(sys.argv[1]), sys.argv[2]
    RECORDED.mkdir(exist_ok=True)
    target = RECORDED / f"{version}.json"
    target.write_text(json.dumps(record(root), indent=1) + "\n")
    print(f"{target}: {missing(record(root)) or 'all there'}")
