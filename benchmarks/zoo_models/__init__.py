"""The zoo's catalogue: small models of many architectures, each with a batch it can train on."""

from zoo_models.entry import Entry, MissingError
from zoo_models.others import AUDIO, DIFFUSERS, MULTIMODAL, OWN, SERIES
from zoo_models.text import DECODERS, ENCODERS, MIXTURES, PAIRS, STATE_SPACES
from zoo_models.vision import VISION

CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        *ENCODERS,
        *DECODERS,
        *MIXTURES,
        *STATE_SPACES,
        *PAIRS,
        *VISION,
        *AUDIO,
        *MULTIMODAL,
        *SERIES,
        *DIFFUSERS,
        *OWN,
    )
}

__all__ = ["CATALOGUE", "Entry", "MissingError"]
