-- Tables of the code host.
CREATE TABLE user (
    id INTEGER PRIMARY KEY, username TEXT UNIQUE NOT NULL, name TEXT UNIQUE NOT NULL,
    email TEXT NOT NULL, status TEXT NOT NULL DEFAULT '', joined TEXT NOT NULL);
CREATE TABLE project (
    id INTEGER PRIMARY KEY, owner_id INTEGER NOT NULL REFERENCES user (id), name TEXT NOT NULL,
    slug TEXT NOT NULL, description TEXT NOT NULL, language TEXT NOT NULL, readme TEXT NOT NULL,
    created TEXT NOT NULL, num_stars INTEGER NOT NULL, num_forks INTEGER NOT NULL,
    forked_from INTEGER REFERENCES project (id), UNIQUE (owner_id, slug));
CREATE TABLE star (project_id INTEGER PRIMARY KEY REFERENCES project (id));
CREATE TABLE member (
    project_id INTEGER NOT NULL REFERENCES project (id),
    user_id INTEGER NOT NULL REFERENCES user (id), role TEXT NOT NULL,
    PRIMARY KEY (project_id, user_id));
CREATE TABLE issue (
    id INTEGER PRIMARY KEY, project_id INTEGER NOT NULL REFERENCES project (id),
    number INTEGER NOT NULL, title TEXT NOT NULL, body TEXT NOT NULL, label TEXT NOT NULL,
    is_open INTEGER NOT NULL DEFAULT 1, author_id INTEGER NOT NULL REFERENCES user (id),
    assignee_id INTEGER REFERENCES user (id), created TEXT NOT NULL,
    UNIQUE (project_id, number));
CREATE TABLE remark (
    id INTEGER PRIMARY KEY, issue_id INTEGER NOT NULL REFERENCES issue (id),
    author_id INTEGER NOT NULL REFERENCES user (id), body TEXT NOT NULL, created TEXT NOT NULL);
CREATE TABLE change (
    id INTEGER PRIMARY KEY, project_id INTEGER NOT NULL REFERENCES project (id),
    sha TEXT NOT NULL, title TEXT NOT NULL, author_id INTEGER NOT NULL REFERENCES user (id),
    created TEXT NOT NULL, UNIQUE (project_id, sha));
CREATE TABLE merge_request (
    id INTEGER PRIMARY KEY, project_id INTEGER NOT NULL REFERENCES project (id),
    number INTEGER NOT NULL, title TEXT NOT NULL, source TEXT NOT NULL, state TEXT NOT NULL,
    author_id INTEGER NOT NULL REFERENCES user (id),
    reviewer_id INTEGER NOT NULL REFERENCES user (id), created TEXT NOT NULL,
    UNIQUE (project_id, number));
CREATE VIEW projects AS
    SELECT project.*, user.username AS owner, user.name AS owner_name,
           project.num_stars + (star.project_id IS NOT NULL) AS stars,
           star.project_id IS NOT NULL AS is_starred
    FROM project JOIN user ON user.id = owner_id
    LEFT JOIN star ON star.project_id = project.id;
CREATE VIEW issues AS
    SELECT issue.*, author.name AS author, assignee.name AS assignee FROM issue
    JOIN user AS author ON author.id = author_id
    LEFT JOIN user AS assignee ON assignee.id = assignee_id;
CREATE VIEW merge_requests AS
    SELECT merge_request.*, author.name AS author, reviewer.name AS reviewer FROM merge_request
    JOIN user AS author ON author.id = author_id
    JOIN user AS reviewer ON reviewer.id = reviewer_id;
