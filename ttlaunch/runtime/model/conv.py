"""A convolutional classifier of small images, cut like the transformer: embedding, blocks, head.

Between its parts an image is a vector for each pixel, so every recipe moves it as it moves tokens. Residual blocks as
in K. He et al., "Identity Mappings in Deep Residual Networks", ECCV 2016, with layer norms, which need no statistics
over a batch that ranks would have to share.

Shapes: B = images of a micro-batch, T = pixels of an image, S = pixels of its side, D = embedding_dim, V = classes.
"""

from math import isqrt

from torch import Tensor, nn
from torch.nn import functional

from ttlaunch.runtime.model.activations import ACTIVATIONS
from ttlaunch.runtime.model.dropout import Dropout, Masks
from ttlaunch.runtime.model.layers import WHOLE, Layers
from ttlaunch.spec.recipe.sections import TransformerConfig

_BRIGHTEST = 255


class ImageEmbedding(nn.Module):
    """Each pixel with those around it as a vector."""

    def __init__(self, cfg: TransformerConfig, *, vocabulary: int) -> None:
        super().__init__()
        del vocabulary
        self.around = nn.Conv2d(1, cfg.embedding_dim, 3, padding=1)
        self.dropout = Dropout("embedding", probability=cfg.dropout_prob)

    def forward(self, pixels_BT: Tensor, masks: Masks | None) -> Tensor:
        x_BTD: Tensor = self.dropout(_convolved(self.around, (pixels_BT / _BRIGHTEST)[:, :, None]), masks)
        return x_BTD


class ConvolutionBlock(nn.Module):
    """A convolution and a layer over each pixel, added to the residual stream."""

    def __init__(self, cfg: TransformerConfig, *, index: int, layers: Layers = WHOLE) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[cfg.activation]
        width = cfg.embedding_dim
        self.convolution_norm = nn.LayerNorm(width)
        self.convolution_in = layers.convolution_in(width, width)
        self.convolution_out = layers.linear_out(width, width)
        self.dropout = Dropout(f"blocks.{index}.convolution", probability=cfg.dropout_prob)

    def forward(self, x_BTD: Tensor, masks: Masks | None) -> Tensor:
        hidden = self.activation(_convolved(self.convolution_in, self.convolution_norm(x_BTD)))
        out_BTD: Tensor = x_BTD + self.dropout(self.convolution_out(hidden), masks)
        return out_BTD


class ClassHead(nn.Module):
    """Scores of the classes, from the mean over the pixels of each quarter of the image."""

    def __init__(self, cfg: TransformerConfig, *, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * cfg.embedding_dim)
        self.output = nn.Linear(4 * cfg.embedding_dim, vocabulary, bias=False)

    def forward(self, x_BTD: Tensor, *, tied_VD: Tensor | None = None) -> Tensor:
        """Logits, shape (B, 1, V): one answer an image."""
        del tied_VD
        quarters_B1 = functional.adaptive_avg_pool2d(_as_image(x_BTD), 2).flatten(1)[:, None]
        logits_B1V: Tensor = self.output(self.norm(quarters_B1))
        return logits_B1V


def _as_image(x_BTD: Tensor) -> Tensor:
    batch, pixels, width = x_BTD.shape
    return x_BTD.transpose(1, 2).reshape(batch, width, isqrt(pixels), isqrt(pixels))


def _convolved(convolution: nn.Module, x_BTD: Tensor) -> Tensor:
    y_BTD: Tensor = convolution(_as_image(x_BTD)).flatten(2).transpose(1, 2)
    return y_BTD.contiguous()
