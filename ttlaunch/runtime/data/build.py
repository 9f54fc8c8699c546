"""The data that a configuration asks for."""

from ttlaunch.recipe import TrainingFile
from ttlaunch.recipe.corpus import Corpus
from ttlaunch.recipe.images import has_images
from ttlaunch.runtime.data.batches import TrainingData
from ttlaunch.runtime.data.images import ImageData
from ttlaunch.runtime.data.text import TextData


def build_data(corpus: Corpus, cfg: TrainingFile) -> TrainingData:
    """Cut a text into sequences, or rows into images.

    Raises:
        CorpusError: It is too short, or not what the model is for.
    """
    return ImageData(corpus, cfg) if has_images(cfg) else TextData(corpus, cfg)
