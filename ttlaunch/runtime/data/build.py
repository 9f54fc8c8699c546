"""The data that a configuration asks for."""

from ttlaunch.runtime.data.batches import TrainingData
from ttlaunch.runtime.data.images import ImageData
from ttlaunch.runtime.data.synthetic import SyntheticData
from ttlaunch.runtime.data.text import TextData
from ttlaunch.spec.recipe.corpus import Corpus
from ttlaunch.spec.recipe.images import has_images
from ttlaunch.spec.recipe.sections import TrainingFile
from ttlaunch.spec.recipe.synthetic import is_synthetic


def build_data(corpus: Corpus, cfg: TrainingFile) -> TrainingData:
    """Cut a text into sequences, or rows into images, or draw sequences.

    Raises:
        CorpusError: It is too short, or not what the model is for.
    """
    if is_synthetic(cfg):
        return SyntheticData(corpus, cfg)
    return ImageData(corpus, cfg) if has_images(cfg) else TextData(corpus, cfg)
