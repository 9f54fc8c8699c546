"""What a serving run is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ttlaunch.recipe import Bits, Layout, Recipe, Section, TrainingFile, all_pairs, chain, per

from .traffic import traffic

Positive = Annotated[int, Field(ge=1, le=10**6)]


class ServeConfig(Section):
    """What is served, by how many ranks, and for how many streams at once; `ttlaunch generate` fills it in."""

    marks: ClassVar[tuple[Bits, ...]] = (Bits.FREE,)

    model: str = Field("", description="what answers are said to come from: the recipe and the run")
    weights_sha256: str = Field("", description="hash over all parameters, as the report of the training has it")
    provenance_sha256: str | None = Field(None, description="hash of the checkpoint's provenance; null: it has none")
    vocabulary: Positive = Field(256, description="number of different tokens, the rows of the embedding")
    alphabet: list[int] = Field([], description="tokenizer_type char: the code points that are tokens, ascending")
    tokenizer_file: str = Field("", description="the checked tokenizer.json of a model of others; empty: one of ours")
    tokenizer_sha256: str = Field("", description="the hash of tokenizer_file")
    ends: list[int] = Field([], description="tokens of tokenizer_file that end a text")
    chat_template: str | None = Field(None, description="the model's chat template in Jinja; null: contents in turn")
    special_tokens: dict[str, str] = Field({}, description="texts that chat_template asks for by name")
    stages: Annotated[int, Field(ge=0, le=63)] = Field(0, description="ranks besides the head that have blocks")
    shares: Annotated[int, Field(ge=0, le=63)] = Field(0, description="ranks besides the head that have columns")
    max_streams: Annotated[int, Field(ge=1, le=64)] = Field(8, description="slots: streams computed at once")
    max_waiting: Annotated[int, Field(ge=0, le=4096)] = Field(32, description="streams that may wait for a slot")
    max_context: Positive | None = Field(None, description="tokens of a stream; null: max_sequence_length")
    training_rows: Positive | None = Field(None, description="tokens of a micro-batch; null: those of one sequence")
    exact: Literal["auto", "on", "off"] = Field("auto", description="on: only with the bits of training; off: faster")
    until_left: bool = Field(default=False, description="end when everybody who has connected has left again")
    guesses: bool = Field(default=True, description="compute guessed tokens in idle rows; changes no token")

    @property
    def split(self) -> Literal["stages", "columns"]:
        """Return what each of several ranks has: blocks, or columns of matrices."""
        return "columns" if self.shares else "stages"


class Config(TrainingFile):
    """The sections of the training, whose model it is, and what a serving run adds."""

    serve_config: ServeConfig = ServeConfig()


RECIPE = Recipe(
    summary="The ranks answer asks with a trained model: the head with all of it, or with stages or shares.",
    config=Config,
    layouts=[
        Layout("head", head=1),
        Layout("stages", head=1, stage=per("serve_config.stages")),
        Layout("columns", head=1, share=per("serve_config.shares")),
    ],
    flows=[("head", "stage"), chain("stage"), ("head", "share"), all_pairs("share")],
    unread=[f"multihost_config.{key}" for key in ("pipeline_parallel_config", "num_workers", "bucket_megabytes")],
    traffic=traffic,
    is_asynchronous=True,  # ranks report how many plans there were
    uses_data=False,
    only_weights=True,
    elastic="each rank holds parts of the model that nobody else has",
)
