-- Tables of the forum.
CREATE TABLE user (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, bio TEXT NOT NULL DEFAULT '',
    joined TEXT NOT NULL);
CREATE TABLE forum (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, description TEXT NOT NULL,
    num_subscribers INTEGER NOT NULL);
CREATE TABLE subscription (forum_id INTEGER PRIMARY KEY REFERENCES forum (id));
CREATE TABLE post (
    id INTEGER PRIMARY KEY, forum_id INTEGER NOT NULL REFERENCES forum (id),
    author_id INTEGER NOT NULL REFERENCES user (id), title TEXT NOT NULL, body TEXT NOT NULL,
    score INTEGER NOT NULL, created TEXT NOT NULL);
CREATE TABLE comment (
    id INTEGER PRIMARY KEY, post_id INTEGER NOT NULL REFERENCES post (id),
    author_id INTEGER NOT NULL REFERENCES user (id), body TEXT NOT NULL,
    score INTEGER NOT NULL, created TEXT NOT NULL);
CREATE INDEX comment_post ON comment (post_id);
CREATE TABLE vote (post_id INTEGER PRIMARY KEY REFERENCES post (id), value INTEGER NOT NULL);
CREATE VIEW posts AS
    SELECT post.*, forum.name AS forum, user.name AS author, coalesce(vote.value, 0) AS vote,
           score + coalesce(vote.value, 0) AS total,
           (SELECT count(*) FROM comment WHERE post_id = post.id) AS num_comments
    FROM post JOIN forum ON forum.id = forum_id JOIN user ON user.id = author_id
    LEFT JOIN vote ON vote.post_id = post.id;
CREATE VIEW forums AS
    SELECT forum.*, subscription.forum_id IS NOT NULL AS is_subscribed,
           num_subscribers + (subscription.forum_id IS NOT NULL) AS subscribers,
           (SELECT count(*) FROM post WHERE forum_id = forum.id) AS num_posts
    FROM forum LEFT JOIN subscription ON subscription.forum_id = forum.id;
