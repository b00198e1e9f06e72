"""A loaded module as a user has it, for every set of outputs: one backward or several, for all inputs or some, on both exporters, against eager."""

import pytest
import torch

from tests.exporter.module.test_absent import Net, compare, gradients, inputs, loaded, subsets


def some_inputs(module, chosen):
    """The gradients of one input and a tied weight alone."""
    x, z = inputs(2)
    results = module(x, z)
    return torch.autograd.grad([results[place].sin().sum() for place in chosen], [x, module.get_parameter("b.weight")], allow_unused=True)


@pytest.mark.parametrize("training", [False, True], ids=["forward file", "training file"])
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_use(dynamo, training):
    torch.manual_seed(0)
    model = Net().train()
    module, names = loaded(model, dynamo, training), [name for name, _ in model.named_parameters()]
    for chosen in subsets(6):
        compare(gradients(module, names, chosen), gradients(model, names, chosen))
        compare(gradients(module, names, chosen, retain=True), gradients(model, names, chosen, retain=True))
        compare(some_inputs(module, chosen), some_inputs(model, chosen))
