-- Tables of the city map.
CREATE TABLE place (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, slug TEXT UNIQUE NOT NULL,
    category TEXT NOT NULL, number INTEGER NOT NULL, street TEXT NOT NULL, avenue TEXT NOT NULL,
    quarter TEXT NOT NULL, col INTEGER NOT NULL, line INTEGER NOT NULL, phone TEXT NOT NULL,
    rating REAL NOT NULL, is_accessible INTEGER NOT NULL, UNIQUE (col, line));
CREATE TABLE hours (
    place_id INTEGER NOT NULL REFERENCES place (id), weekday INTEGER NOT NULL,
    opens TEXT NOT NULL, closes TEXT NOT NULL, PRIMARY KEY (place_id, weekday));
CREATE TABLE saved (place_id INTEGER PRIMARY KEY, note TEXT NOT NULL);
CREATE TABLE correction (
    id INTEGER PRIMARY KEY, place_id INTEGER NOT NULL REFERENCES place (id),
    topic TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE road (axis TEXT NOT NULL, position INTEGER NOT NULL, name TEXT NOT NULL,
    PRIMARY KEY (axis, position));
