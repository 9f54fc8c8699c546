"""The data that a configuration asks for."""

from ttlaunch.recipe import TrainingFile
from ttlaunch.recipe.corpus import Corpus
from ttlaunch.recipe.images import has_images
from ttlaunch.recipe.synthetic import is_synthetic
from ttlaunch.runtime.data.batches import TrainingData
from ttlaunch.runtime.data.images import ImageData
from ttlaunch.runtime.data.synthetic import SyntheticData
from ttlaunch.runtime.data.text import TextData


def build_data(corpus: Corpus, cfg: TrainingFile) -> TrainingData:
    """Cut a text into sequences, or rows into images, or draw sequences.

    Raises:
        CorpusError: It is too short, or not what the model is for.
    """
    if is_synthetic(cfg):
        return SyntheticData(corpus, cfg)
    return ImageData(corpus, cfg) if has_images(cfg) else TextData(corpus, cfg)
