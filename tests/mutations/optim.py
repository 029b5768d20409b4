"""Optimizers, main gradients and the loss scale, broken."""

from tests.mutations import Mutation

OPTIM = "tests/test_optim.py"
MAIN = "tests/test_main_gradients.py"
PRECISION = "tests/test_precision.py"
KERNEL = "tests/kernels/test_adamw.py"

MUTATIONS = [
    Mutation("31 each rank decides for itself", "mpcore/precision.py",
             'good = bool(all_reduce(found, self.mesh.world, "min"))', "good = bool(found)", PRECISION),
    Mutation("31 only the data ranks agree", "mpcore/precision.py",
             "all_reduce(found, self.mesh.world,", "all_reduce(found, self.mesh.data,", PRECISION),
    Mutation("31 main gradients stay scaled", "mpcore/precision.py",
             "grad = gradient_of(parameter)", "grad = parameter.grad", PRECISION),
    Mutation("32 autograd adds the product as well", "mpcore/layers/products.py",
             "    return None\n\n\ndef _weight_product",
             "    return gradient(None, *of)\n\n\ndef _weight_product", MAIN),
    Mutation("32 a backward in two passes adds twice", "mpcore/layers/products.py",
             "    if wanted:  #", "    if True:  #", MAIN),
    Mutation("32 the last step's gradients stay", "mpcore/gradients.py",
             "            parameter.main_grad.zero_()", "            parameter.main_grad", MAIN),
    Mutation("32 what was added is added again", "mpcore/gradients.py",
             "        parameter.grad = None\n        parameter.grad_added_to", "        parameter.grad_added_to", MAIN),
    Mutation("44 products are rounded before the sum", "mpcore/layers/products.py",
             "main.addmm_(dy.t().to(main.dtype), x.to(main.dtype))", "main.add_(dy.t() @ x)", MAIN),
    Mutation("34 vectors decay", "mpcore/optim.py", '"weight_decay": 0.0}', '"weight_decay": weight_decay}', OPTIM),
    Mutation("34 random bits follow the local index", "mpcore/optim.py",
             '"place": self._places[p]}', '"place": None}', OPTIM),
    Mutation("34 Muon takes Q, K and V for one matrix", "mpcore/optim.py",
             "if sharding.blocks else (whole,)", "if False else (whole,)", OPTIM),
    Mutation("34 Muon's ranks mistake whose matrix is whose", "mpcore/optim.py",
             "for axis in reversed(axes):", "for axis in axes:", OPTIM),
    Mutation("34 Muon waits for ranks without a gradient", "mpcore/optim.py",
             "        if not axes or not parameters:\n", "        if True:\n", OPTIM),
    Mutation("38 torch narrows the masters it loads", "mpcore/optim.py",
             "self.state[p][slot] = value.to(p.device, copy=True)", "pass", OPTIM),
    Mutation("38 another layout's state is read past its end", "mpcore/optim.py",
             "if value.dim() and not lies_as(value, p):", "if False:", OPTIM),
    Mutation("a group that is refused stays", "mpcore/optim.py", "            self.param_groups.pop()\n", "", OPTIM),
    Mutation("a late group of Muon has none of its settings", "mpcore/optim.py",
             '{**self.options, **param_group} if param_group.get("muon")', 'param_group if param_group.get("muon")',
             OPTIM),
    Mutation("32 an optimizer that reads .grad alone steps nothing", "mpcore/gradients.py",
             "if not ours and p.grad is None", "if False and p.grad is None", MAIN),
    Mutation("random rounding is cutting off", "kernels/adamw.py",
             "(x.view(torch.int32) + bits.to(torch.int32))", "x.view(torch.int32)", KERNEL),
    Mutation("the three roundings share their bits", "kernels/adamw.py",
             "return first & 0xFFFF, first >> 16, second & 0xFFFF", "return (first & 0xFFFF,) * 3", KERNEL),
    Mutation("a launch forgets how wide its integers are", "kernels/_triton.py",
             ", -(2**31) <= s < 2**31)", ", True)", KERNEL),
]  # fmt: skip
