"""What a serving run is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ttlaunch.recipe import Bits, Layout, Recipe, Section, TrainingFile, all_pairs, chain, per

Positive = Annotated[int, Field(ge=1, le=10**6)]


class ServeConfig(Section):
    """What is served, by how many ranks, and for how many streams at once; `ttlaunch generate` fills it in."""

    marks: ClassVar[tuple[Bits, ...]] = (Bits.FREE,)

    model: str = Field("", description="what answers are said to come from: the recipe and the run")
    weights_sha256: str = Field("", description="hash over all parameters, as the report of the training has it")
    vocabulary: Positive = Field(256, description="number of different tokens, the rows of the embedding")
    alphabet: list[int] = Field([], description="tokenizer_type char: the code points that are tokens, ascending")
    stages: Annotated[int, Field(ge=0, le=63)] = Field(0, description="ranks besides the head that have blocks")
    shares: Annotated[int, Field(ge=0, le=63)] = Field(
        0, description="ranks besides the head with columns of every matrix"
    )
    tokenizer_file: str = Field("", description="the checked tokenizer.json of a model of others; empty: one of ours")
    tokenizer_sha256: str = Field("", description="the hash of tokenizer_file")
    ends: list[int] = Field([], description="tokens of tokenizer_file that end a text")
    chat_template: str | None = Field(None, description="the model's chat template in Jinja; null: contents in turn")
    special_tokens: dict[str, str] = Field({}, description="texts that chat_template asks for by name")
