"""What can be said and asked about the things of the generated world."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact: of each thing of `kind` it has at most one value.

    Attributes:
        target: kind of the value; "" when it is a number or a plain word.
        phrase, clause: two ways to name the value, with {} for the thing.
        asks: the question, as a search, in a quiz and as from a table.
        query: words that find the fact beside the thing's name.
        sentence: as the passage says it, after the thing's name or a pronoun.
    """

    kind: str
    key: str
    target: str
    phrase: str
    clause: str
    asks: tuple[str, str, str]
    query: str
    sentence: str


def _relations(kind: str, *rows: tuple[str, str, str, str, str, str]) -> list[Relation]:
    """Returns relations of a kind: key:target, phrase, clause, asks split by "|", query, text."""
    relations = []
    for name, phrase, clause, asks, query, sentence in rows:
        key, _, target = name.partition(":")
        search, quiz, table = asks.split("|")
        three = (search, quiz, table)
        relations.append(Relation(kind, key, target, phrase, clause, three, query, sentence))
    return relations


YEAR_ASKS = "In what year was {} founded?|Which year saw the founding of {}?|When was {} founded?"
WORK_YEAR = "In what year was {} released?|Which year saw the release of {}?|When did {} come out?"
YEAR = "the year in which {} was founded"
CITY_ASKS = "In which city is {} based?|Which city is home to {}?|What city is {} based in?"

RELATIONS = (
    *_relations(
        "person",
        ("birth_city:city", "the birthplace of {}", "the city where {} was born",
         "In which city was {} born?|Which city is the birthplace of {}?|What is {}'s birthplace?",
         "born in city", "was born in the city of {}"),
        ("birth_year", "the birth year of {}", "the year in which {} was born",
         "In what year was {} born?|Which year saw the birth of {}?|When was {} born?",
         "born year", "entered the world in the year {}"),
        ("occupation", "the occupation of {}", "what {} does for a living",
         "What is the occupation of {}?|By what profession is {} known?|What is {}'s occupation?",
         "profession", "has the profession of {}"),
        ("university:university", "the university of {}", "the university where {} studied",
         "At which university did {} study?|Which university educated {}?|Where was {} educated?",
         "studied university", "studied at the {}"),
        ("father:person", "the father of {}", "the man whose child is {}",
         "Who is the father of {}?|Which man is the father of {}?|Who is {}'s father?",
         "father", "is a child of the father {}"),
        ("mother:person", "the mother of {}", "the woman whose child is {}",
         "Who is the mother of {}?|Which woman is the mother of {}?|Who is {}'s mother?",
         "mother", "has as mother {}"),
        ("spouse:person", "the spouse of {}", "the person who is married to {}",
         "Who is the spouse of {}?|To whom is {} married?|Who is {}'s spouse?",
         "married", "is married to {}"),
        ("employer:company", "the employer of {}", "the company that employs {}",
         "Which company employs {}?|For which company does {} work?|Who is {}'s employer?",
         "employed company", "is employed by the company {}"),
    ),
    *_relations(
        "film",
        ("director:person", "the director of {}", "the person who directed {}",
         "Who directed {}?|Which film-maker directed {}?|Who was the director of {}?",
         "directed", "was directed by {}"),
        ("star:person", "the star of {}", "the person who has the leading part in {}",
         "Who stars in {}?|Who has the leading part in {}?|Who is the star of {}?",
         "leading part", "gives the leading part to {}"),
        ("composer:person", "the composer of {}", "the person who wrote the music of {}",
         "Who composed the music of {}?|Who wrote the music of {}?|Who was the composer of {}?",
         "music", "has music by {}"),
        ("year", "the year of {}", "the year in which {} was released", WORK_YEAR,
         "released year", "was released in {}"),
    ),
    *_relations(
        "novel",
        ("author:person", "the author of {}", "the person who wrote {}",
         "Who wrote {}?|Which writer is responsible for {}?|Who is the author of {}?",
         "written", "was written by {}"),
        ("publisher:company", "the publisher of {}", "the company that published {}",
         "Which company published {}?|By which company was {} published?|Who is {}'s publisher?",
         "published", "was published by the company {}"),
        ("year", "the year of {}", "the year in which {} appeared",
         "In what year did {} appear?|Which year saw the first edition of {}?|When was {} printed?",
         "appeared year", "first appeared in {}"),
    ),
    *_relations(
        "album",
        ("band:band", "the band behind {}", "the band that recorded {}",
         "Which band recorded {}?|By which band is {}?|Who is the performer of {}?",
         "recorded band", "was recorded by the band {}"),
        ("label:company", "the label of {}", "the company that issued {}",
         "Which company issued {}?|On the label of which company is {}?|What is {}'s label?",
         "issued label", "was issued by the label {}"),
        ("year", "the year of {}", "the year in which {} was released", WORK_YEAR,
         "released year", "was released in {}"),
    ),
    *_relations(
        "painting",
        ("artist:person", "the painter of {}", "the person who painted {}",
         "Who painted {}?|Which artist painted {}?|Who is the creator of {}?",
         "painted", "was painted by {}"),
        ("museum:museum", "the museum of {}", "the museum where {} hangs",
         "In which museum is {}?|Which museum owns {}?|What museum is {} in?",
         "hangs museum", "hangs in the {}"),
    ),
    *_relations(
        "company",
        ("founder:person", "the founder of {}", "the person who founded {}",
         "Who founded {}?|Which person set up {}?|Who is the founder of {}?",
         "founded by", "was founded by {}"),
        ("city:city", "the home city of {}", "the city where {} is based", CITY_ASKS,
         "based city", "is based in the city of {}"),
        ("year", YEAR, YEAR, YEAR_ASKS, "founded year", "began its business in {}"),
        ("industry", "the trade of {}", "what {} produces",
         "What does {} produce?|Which goods does {} make?|What is {}'s product?",
         "produces", "produces {}"),
    ),
    *_relations(
        "university",
        ("city:city", "the home city of {}", "the city where {} is based", CITY_ASKS,
         "city", "stands in the city of {}"),
        ("year", YEAR, YEAR, YEAR_ASKS, "founded year", "was founded in {}"),
        ("rector:person", "the rector of {}", "the person who leads {}",
         "Who is the rector of {}?|Which person leads {}?|Who is {}'s rector?",
         "rector", "is led by the rector {}"),
    ),
    *_relations(
        "museum",
        ("city:city", "the home city of {}", "the city where {} is based", CITY_ASKS,
         "city", "stands in the city of {}"),
        ("architect:person", "the architect of {}", "the person who designed {}",
         "Who designed {}?|Which architect drew the plans of {}?|Who is {}'s architect?",
         "architect", "was designed by the architect {}"),
    ),
    *_relations(
        "band",
        ("singer:person", "the singer of {}", "the person who sings in {}",
         "Who is the singer of {}?|Whose voice leads {}?|Who is {}'s singer?",
         "singer", "has as singer {}"),
        ("city:city", "the home city of {}", "the city where {} was formed",
         "In which city was {} formed?|Which city is home to {}?|What city is {} from?",
         "formed city", "was formed in the city of {}"),
        ("year", "the year of {}", "the year in which {} was formed",
         "In what year was {} formed?|Which year saw the first concert of {}?|When was {} formed?",
         "year first concert", "gave a first concert in {}"),
    ),
    *_relations(
        "team",
        ("city:city", "the home city of {}", "the city where {} plays",
         "In which city does {} play?|Which city is home to {}?|What city is {} from?",
         "plays city", "plays at home in the city of {}"),
        ("coach:person", "the coach of {}", "the person who coaches {}",
         "Who coaches {}?|Which person trains {}?|Who is {}'s coach?",
         "coach", "is trained by the coach {}"),
        ("sport", "the sport of {}", "what {} plays",
         "What sport does {} play?|At which sport does {} compete?|What is {}'s sport?",
         "sport", "competes in the sport of {}"),
    ),
    *_relations(
        "city",
        ("country:country", "the country of {}", "the country in which {} lies",
         "In which country is {}?|Of which country is {} a part?|What country is {} in?",
         "country", "lies in the country of {}"),
        ("river:river", "the river of {}", "the river that flows through {}",
         "Which river flows through {}?|On which river does {} stand?|What is {}'s river?",
         "river", "stands on the river {}"),
        ("mayor:person", "the mayor of {}", "the person who governs {}",
         "Who is the mayor of {}?|Which person governs {}?|Who is {}'s mayor?",
         "mayor", "is governed by the mayor {}"),
        ("population", "the population of {}", "the number of people in {}",
         "How many people live in {}?|What is the head count of {}?|What is {}'s population?",
         "population", "has a population of {}"),
    ),
    *_relations(
        "country",
        ("capital:city", "the capital of {}", "the city from which {} is ruled",
         "What is the capital of {}?|Which city is the capital of {}?|What is {}'s capital?",
         "capital", "has as capital the city of {}"),
        ("currency", "the currency of {}", "the money of {}",
         "What is the currency of {}?|With what money does one pay in {}?|What is {}'s currency?",
         "currency", "pays in a currency called the {}"),
        ("peak:mountain", "the highest mountain of {}", "the mountain that is highest in {}",
         "What is the highest mountain of {}?|Which peak is the roof of {}?|What is {}'s summit?",
         "highest mountain", "has as highest mountain {}"),
    ),
    *_relations(
        "river",
        ("length", "the length of {}", "the way from source to mouth of {}",
         "How long is {}?|What is the length of {}?|What is {}'s length?",
         "length kilometres", "has a length of {}"),
        ("source:mountain", "the source of {}", "the mountain where {} begins",
         "On which mountain does {} begin?|Which mountain feeds {}?|What is {}'s source?",
         "begins mountain", "begins on the slopes of {}"),
    ),
    *_relations(
        "mountain",
        ("height", "the height of {}", "the way from sea to top of {}",
         "How high is {}?|What is the height of {}?|What is {}'s height?",
         "height metres", "has a height of {}"),
        ("climber:person", "the first climber of {}", "the person who first climbed {}",
         "Who first climbed {}?|Which person stood first on top of {}?|Who is {}'s first climber?",
         "first climbed", "was first climbed by {}"),
    ),
)  # fmt: skip

NOUN_BEFORE_NAME = {
    "film": "the film ",
    "novel": "the novel ",
    "album": "the album ",
    "painting": "the painting ",
    "company": "the company ",
    "band": "the band ",
    "team": "the team ",
    "river": "the river ",
    "museum": "the ",
    "university": "the ",
}


def of_kind(kind: str) -> list[Relation]:
    """Returns the relations of things of a kind."""
    return [relation for relation in RELATIONS if relation.kind == kind]
