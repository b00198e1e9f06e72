"""Models of transformers at their smallest, in training mode: outputs, gradients and three steps of SGD, beside eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.trains import assert_close, assert_same_grads, loaded

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


def swin():
    import transformers

    config = transformers.SwinConfig(
        image_size=16, patch_size=2, num_channels=3, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.SwinForImageClassification(config), torch.randn(2, 3, 16, 16)


SPEECH = {
    "vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "conv_dim": (8, 8),
    "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0,
    "apply_spec_augment": False, "classifier_proj_size": 8, "num_labels": 3, "attn_implementation": "eager",
}  # fmt: skip


def wav2vec2():
    import transformers

    return transformers.Wav2Vec2ForSequenceClassification(transformers.Wav2Vec2Config(**SPEECH)), torch.randn(2, 200)


def hubert():
    import transformers

    return transformers.HubertForSequenceClassification(transformers.HubertConfig(**SPEECH)), torch.randn(2, 200)


@pytest.mark.parametrize("make", [swin, wav2vec2, hubert], ids=lambda make: make.__name__)
def test_trains_as_in_eager_mode(make, dynamo):
    model, x = make()
    model = Logits(model).train()
    module = loaded(model, (x,), dynamo=dynamo).train()
    both = [(each, torch.optim.SGD(each.parameters(), lr=0.05)) for each in (module, model)]
    for _ in range(3):
        y, expected = module(x), model(x)
        assert_close(y, expected)
        for (_, optimizer), result in zip(both, (y, expected), strict=True):
            optimizer.zero_grad()
            result.square().mean().backward()
        assert_same_grads(module, model)
        for _, optimizer in both:
            optimizer.step()
