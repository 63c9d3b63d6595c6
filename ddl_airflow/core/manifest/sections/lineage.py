"""lineage: what is kept, beyond the record, of how a model came to be."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.values import truth


class Lineage(Section):
    """What is kept of how the model came to be. No part of the manifest's digest."""

    prove: Annotated[bool, BeforeValidator(truth)] = Field(
        default=False,
        description="Whether rank 0 notes digests of the weights as it trains, and each file of "
        "the data has one, so that `ddl-airflow rerun --prove` can say that the model comes out "
        "the same, or from which step and tensor on it does not.",
        examples=[True],
    )
    code: Annotated[bool, BeforeValidator(truth)] = Field(
        default=True,
        description="Whether the scripts are published beside the model, all files of the folder "
        "`code`. Without them models can be neither compared by their code nor made again.",
        examples=[False],
    )
