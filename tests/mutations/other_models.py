"""What models of other makes bring, broken: torch's encoders, buffers, ties, wrappers, DTensors and other meshes."""

from tests.mutations import Mutation

PARALLELIZE = "tests/test_parallelize.py"
META = "tests/layers/test_compile_autocast_meta.py"
SHARDING = "tests/test_sharding.py"
GRADIENTS = "tests/test_gradients.py"
MESH = "tests/test_mesh.py"

MUTATIONS = [
    Mutation(
        "other models: a torch encoder layer keeps its fast path",
        "mpcore/parallelize.py",
        "                module.activation_relu_or_gelu = 0\n",
        "                pass\n",
        PARALLELIZE,
    ),
    Mutation(
        "other models: a torch encoder makes nested tensors",
        "mpcore/parallelize.py",
        "                module.use_nested_tensor = False\n",
        "                pass\n",
        PARALLELIZE,
    ),
    Mutation(
        "other models: torch's attention is cut",
        "mpcore/parallelize.py",
        "        if isinstance(parent, nn.MultiheadAttention):\n",
        "        if False:\n",
        PARALLELIZE,
    ),
    Mutation(
        "other models: a buffer that nothing filled stays",
        "mpcore/initialize.py",
        "        if now is buffer and buffer is not None",
        "        if False and buffer is not None",
        META,
    ),
    Mutation(
        "other models: buffers outside the meta device are emptied",
        "mpcore/initialize.py",
        "if x.is_meta or isinstance(x, nn.Parameter) else x.to(device)",
        "",
        META,
    ),
    Mutation(
        "other models: torch's attention begins before its projection",
        "mpcore/initialize.py",
        'sorted(resets.values(), key=lambda reset: not hasattr(reset[1], "reset_parameters"))',
        "list(resets.values())",
        META,
    ),
    Mutation(
        "other models: the state dict has no buffers",
        "mpcore/sharding.py",
        "for name, _, _, buffer in persistent_buffers(model)}\n",
        "for name, _, _, buffer in ()}\n",
        SHARDING,
    ),
    Mutation(
        "other models: buffers aren't loaded",
        "mpcore/sharding.py",
        "        buffer.copy_(given[name])\n",
        "        pass\n",
        SHARDING,
    ),
    Mutation(
        "other models: ties under their first names alone",
        "mpcore/sharding.py",
        "for first, *others in _names(model) for name in others}",
        "for first, *others in _names(model) for name in others[:0]}",
        SHARDING,
    ),
    Mutation(
        "other models: wrappers stay in names",
        "mpcore/sharding.py",
        "            yield plain_name(name), module\n",
        "            yield name, module\n",
        SHARDING,
    ),
    Mutation(
        "other models: a norm over another mesh",
        "mpcore/sharding.py",
        "if all(axis.group is not one.group for one in there):",
        "if False:",
        GRADIENTS,
    ),
    Mutation(
        "other models: a norm of others' DTensors",
        "mpcore/sharding.py",
        "    if is_dtensor(parameter) and sharding.data is None and",
        "    if False and",
        GRADIENTS,
    ),
    Mutation(
        "other models: one process on any device",
        "mpcore/mesh.py",
        '    if asked not in (None, "cuda", "cpu"):\n',
        "    if False:\n",
        MESH,
    ),
]
