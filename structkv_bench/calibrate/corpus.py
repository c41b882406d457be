"""Running text, needles and documents of our own: in no benchmark, the same on any machine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_WHO = ("the ferryman", "our neighbour", "a young teacher", "the postmaster", "her cousin",
        "the old gardener", "a travelling clerk", "the night watchman", "his sister", "the new doctor",
        "a retired sailor", "the bookbinder", "two students", "the miller", "an unknown visitor")  # fmt: skip
_DID = ("walked slowly along", "asked many questions about", "wrote a long letter about", "came back from",
        "had forgotten all about", "spent the whole morning at", "told everyone about", "looked once more at",
        "drew a careful map of", "never spoke of", "took a photograph of", "dreamt of")  # fmt: skip
_WHAT = ("the narrow bridge", "the empty market hall", "the path behind the mill", "the clock on the tower",
         "the river in spring", "the last house of the street", "the garden wall", "the small museum",
         "the train to the coast", "the school's library", "the orchard", "the harbour at night",
         "the broken fountain", "the road over the hills")  # fmt: skip
_WHEN = ("In the morning", "Before the rain began", "On the following day", "Late in the autumn",
         "When the lamps were lit", "After dinner", "A week later", "At the end of that year", "As so often",
         "While the others slept", "To our surprise", "Long ago")  # fmt: skip
_WHY = ("because nobody else would do it", "and the wind was cold", "although it was getting late",
        "and that was the end of the matter", "since the shops were closed", "without saying why",
        "as the custom was in those days", "and the dog followed at a distance", "so that we had to wait",
        "while the bells were ringing", "and for once there was enough time")  # fmt: skip
_ASIDE = ("It was quiet for a while.", "Nothing of this was written down.", "The bread was still warm.",
          "One could hear the water from here.", "There are people who remember it differently.",
          "The price had risen again, they said.", "Nobody was to blame, and nobody was pleased.",
          "A window stood open on the upper floor.", "The answer came sooner than expected.",
          "Most of the chairs had been mended twice.", "It is a story that is often told.")  # fmt: skip


def sentences(seed: int) -> Iterator[str]:
    """Sentences of a text without end, another one for each seed."""
    rng = random.Random(f"running text {seed}")
    while True:
        if rng.random() < 0.25:
            yield rng.choice(_ASIDE)
        else:
            yield (
                f"{rng.choice(_WHEN)} {rng.choice(_WHO)} {rng.choice(_DID)} {rng.choice(_WHAT)}, "
                f"{rng.choice(_WHY)}."
            )


@dataclass(frozen=True)
class Needle:
    """A sentence, `opening` and `answer`, that a question asks for."""

    question: str
    opening: str
    answer: str


NEEDLES = (
    Needle(
        "What is the secret ingredient of Vera's plum cake?",
        "The secret ingredient of Vera's plum cake is",
        "a spoonful of roasted caraway and some grated lemon peel.",
    ),
    Needle(
        "Where did the surveyor hide the brass compass?",
        "The surveyor hid the brass compass",
        "under the third step of the stone stairs behind the chapel.",
    ),
    Needle(
        "How does one open the gate of the Linden observatory?",
        "One opens the gate of the Linden observatory by",
        "lifting the iron ring and turning it twice to the left.",
    ),
    Needle(
        "What must be brought to the winter fair in Hallin?",
        "To the winter fair in Hallin everyone must bring",
        "a striped blanket, two candles and a jar of honey.",
    ),
    Needle(
        "What does the captain of the Meridian paint every spring?",
        "Every spring the captain of the Meridian paints",
        "the anchor chain yellow and the lifeboats dark green.",
    ),
)


@dataclass(frozen=True)
class Document:
    """A text and the keywords that tell what it is about."""

    text: str
    keywords: tuple[str, ...]


_TOPICS = (
    ("beekeeping", ("hive", "honey", "queen", "pollen", "smoker")),
    ("a printing shop", ("ink", "paper", "press", "type", "margin")),
    ("sailing", ("mast", "anchor", "rudder", "harbour", "rope")),
    ("baking", ("oven", "flour", "yeast", "dough", "crust")),
    ("astronomy", ("telescope", "comet", "planet", "orbit", "lens")),
    ("a vineyard", ("grape", "cellar", "barrel", "harvest", "cork")),
    ("clockmaking", ("spring", "pendulum", "gear", "dial", "chime")),
    ("a hospital", ("nurse", "ward", "fever", "bandage", "surgeon")),
    ("mountain hiking", ("summit", "trail", "glacier", "tent", "valley")),
    ("a theatre", ("stage", "actor", "curtain", "costume", "script")),
    ("pottery", ("clay", "kiln", "glaze", "wheel", "vase")),
    ("a railway", ("engine", "signal", "platform", "ticket", "tunnel")),
)
_SAID = (
    "Everyone who knows {topic} speaks of the {a} and the {b}.",
    "First comes the {a}, they say, and only then the {b}.",
    "A good {a} is worth more than any {b}.",
    "Last year the {a} had to be looked after every day.",
    "Without the {a} there would be no {b}, and without the {b} no {c}.",
    "The {a} was old, but the {b} had just been replaced.",
    "Beginners fear the {a} and forget the {c}.",
    "One rule is painted on the door: mind the {b} before the {a}.",
    "An inspector counted each {a} and wrote down the state of the {c}.",
    "It took three people to move the {a} to where the {b} had been.",
    "Of all that belongs to {topic}, the {c} is what visitors ask about.",
)


def document(topic: int, seed: int) -> Iterator[Document]:
    """A document on one of TOPICS subjects, each time a sentence longer."""
    subject, keywords = _TOPICS[topic]
    rng = random.Random(f"document {topic} {seed}")
    text = f"This is a note on {subject}."
    while True:
        a, b, c = rng.sample(keywords, 3)
        text += " " + rng.choice(_SAID).format(topic=subject, a=a, b=b, c=c)
        yield Document(text, tuple(word for word in keywords if f" {word}" in text))


TOPICS = len(_TOPICS)
