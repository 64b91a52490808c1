"""The designs of the generated databases."""

from envhub.envs.sqlgym.schema import Domain, Table, category, key, number, reference, title

CITIES = "Arlow, Brenta, Calder, Dunmore, Elvas, Fjord Bay, Granton, Holm"
COUNTRIES = "Avaria, Borland, Cestia, Dornia, Estoria, Falland"


def _table(name: str, one: str, many: str, num_rows: int, *columns) -> Table:
    return Table(name=name, one=one, many=many, num_rows=num_rows, columns=(key(), *columns))


SHOP = Domain(
    name="shop",
    tables=(
        _table(
            "customers",
            "customer",
            "customers",
            60,
            title(),
            category("city", CITIES),
            category("segment", "private, business, school"),
            number("birth_year", 1950, 2004, label="year of birth"),
        ),
        _table(
            "products",
            "product",
            "products",
            40,
            title(),
            category("category", "garden, kitchen, office, sport, toys"),
            number("price", 2, 240, num_decimals=2),
            number("stock", 0, 90, label="number in stock"),
        ),
        _table(
            "orders",
            "order",
            "orders",
            260,
            title("code"),
            reference("customers", "customer"),
            reference("products", "product"),
            number("quantity", 1, 12),
            category("status", "open, shipped, returned, cancelled"),
            number("order_year", 2019, 2025, label="year"),
        ),
    ),
)

SCHOOL = Domain(
    name="school",
    tables=(
        _table(
            "teachers",
            "teacher",
            "teachers",
            24,
            title(),
            category("subject", "biology, chemistry, history, maths, music"),
            number("salary", 2400, 5200, label="monthly salary"),
        ),
        _table(
            "courses",
            "course",
            "courses",
            45,
            title(),
            reference("teachers", "teacher"),
            category("level", "beginner, intermediate, advanced"),
            number("hours", 10, 90, label="number of hours"),
        ),
        _table(
            "enrolments",
            "enrolment",
            "enrolments",
            280,
            title("code"),
            reference("courses", "course"),
            category("term", "spring, summer, autumn, winter"),
            number("grade", 1, 100),
        ),
    ),
)

LIBRARY = Domain(
    name="library",
    tables=(
        _table(
            "authors",
            "author",
            "authors",
            30,
            title(),
            category("country", COUNTRIES),
            number("birth_year", 1880, 1990, label="year of birth"),
        ),
        _table(
            "books",
            "book",
            "books",
            110,
            title("title"),
            reference("authors", "author"),
            category("genre", "crime, essay, fantasy, poetry, travel"),
            number("num_pages", 60, 900, label="number of pages"),
            number("published", 1920, 2024, label="year of publication"),
        ),
        _table(
            "loans",
            "loan",
            "loans",
            240,
            title("code"),
            reference("books", "book"),
            category("branch", CITIES),
            number("num_days", 1, 60, label="length in days"),
        ),
    ),
)

AIRLINE = Domain(
    name="airline",
    tables=(
        _table(
            "airports",
            "airport",
            "airports",
            20,
            title(),
            category("country", COUNTRIES),
            number("num_gates", 4, 80, label="number of gates"),
        ),
        _table(
            "aircraft",
            "aircraft",
            "aircraft",
            30,
            title("registration", "registration"),
            category("maker", "Aerion, Boreal, Condor Works, Delta Wing"),
            number("num_seats", 40, 380, label="number of seats"),
        ),
        _table(
            "flights",
            "flight",
            "flights",
            260,
            title("number", "flight number"),
            reference("airports", "airport"),
            reference("aircraft", "aircraft"),
            category("weekday", "Monday, Tuesday, Wednesday, Thursday, Friday"),
            number("delay_minutes", 0, 180, label="delay in minutes"),
            number("distance_km", 150, 9000, label="distance in km"),
        ),
    ),
)

CLINIC = Domain(
    name="clinic",
    tables=(
        _table(
            "doctors",
            "doctor",
            "doctors",
            22,
            title(),
            category("speciality", "cardiology, dermatology, neurology, surgery"),
            number("experience_years", 1, 35, label="experience in years"),
        ),
        _table(
            "patients",
            "patient",
            "patients",
            70,
            title(),
            category("city", CITIES),
            category("insurance", "public, private, none"),
            number("age", 1, 96),
        ),
        _table(
            "visits",
            "visit",
            "visits",
            250,
            title("code"),
            reference("doctors", "doctor"),
            reference("patients", "patient"),
            number("cost", 20, 900, num_decimals=2),
            category("outcome", "cured, referred, follow-up"),
        ),
    ),
)

LEAGUE = Domain(
    name="league",
    tables=(
        _table(
            "teams",
            "team",
            "teams",
            16,
            title(),
            category("city", CITIES),
            number("founded", 1890, 2010, label="year of foundation"),
        ),
        _table(
            "players",
            "player",
            "players",
            150,
            title(),
            reference("teams", "team"),
            category("position", "keeper, defender, midfielder, striker"),
            number("height_cm", 160, 205, label="height in cm"),
            number("value", 1, 80, label="value in millions", num_decimals=1),
        ),
        _table(
            "transfers",
            "transfer",
            "transfers",
            160,
            title("code"),
            reference("players", "player"),
            category("kind", "loan, sale, free"),
            number("season", 2015, 2025),
        ),
    ),
)

FILMS = Domain(
    name="films",
    tables=(
        _table(
            "studios",
            "studio",
            "studios",
            14,
            title(),
            category("country", COUNTRIES),
            number("founded", 1910, 2012, label="year of foundation"),
        ),
        _table(
            "films",
            "film",
            "films",
            120,
            title("title"),
            reference("studios", "studio"),
            category("genre", "comedy, drama, horror, western"),
            number("minutes", 70, 210, label="length in minutes"),
            number("budget", 1, 200, label="budget in millions", num_decimals=1),
        ),
        _table(
            "screenings",
            "screening",
            "screenings",
            240,
            title("code"),
            reference("films", "film"),
            category("city", CITIES),
            number("num_visitors", 3, 420, label="number of visitors"),
        ),
    ),
)

FARM = Domain(
    name="farm",
    tables=(
        _table(
            "farms",
            "farm",
            "farms",
            26,
            title(),
            category("region", "coast, hills, plain, valley"),
            number("area_ha", 5, 400, label="area in hectares"),
        ),
        _table(
            "fields",
            "field",
            "fields",
            120,
            title("code"),
            reference("farms", "farm"),
            category("soil", "clay, loam, sand"),
            number("slope", 0, 30, label="slope in percent"),
        ),
        _table(
            "harvests",
            "harvest",
            "harvests",
            250,
            title("code"),
            reference("fields", "field"),
            category("crop", "barley, maize, potatoes, rye, wheat"),
            number("tonnes", 1, 120, label="yield in tonnes", num_decimals=1),
            number("harvest_year", 2012, 2025, label="year"),
        ),
    ),
)

# The test set also asks about designs that the training set never shows.
TRAIN_DOMAINS = (SHOP, SCHOOL, LIBRARY, AIRLINE, CLINIC, LEAGUE)
TEST_DOMAINS = (*TRAIN_DOMAINS, FILMS, FARM)
