"""Task templates of the forum."""

from collections.abc import Iterator

from envhub.envs.minisites.drafts import (
    SiteTemplates,
    Step,
    TaskDraft,
    TaskWorld,
    button,
    ends_at,
    fill,
    holds,
    link,
    reads,
    says,
    says_all,
    shows,
    stop,
)
from envhub.envs.minisites.reddit.seed import WORDS

HOST = "http://reddit.test"
POSTS = (
    "SELECT post.id, title, score, created, forum_id, forum.name AS forum, user.name AS "
    "author, (SELECT count(*) FROM comment WHERE post_id = post.id) AS num_comments FROM post "
    "JOIN forum ON forum.id = forum_id JOIN user ON user.id = author_id ORDER BY post.id"
)
FORUMS = "SELECT id AS forum_id, name AS forum, num_subscribers FROM forum ORDER BY id"
TASKS = SiteTemplates(host=HOST, site="reddit", database="reddit")


def to_forum(forum: str) -> tuple[Step, ...]:
    """Return the steps to the page of a forum."""
    return (link("Forums"), link(forum))


def to_post(forum: str, title: str) -> tuple[Step, ...]:
    """Return the steps to the page of a post."""
    return (*to_forum(forum), link(title))


@TASKS.template
def post_author(world: TaskWorld) -> Iterator[TaskDraft]:
    for post in world.some(40, POSTS):
        yield TaskDraft(
            f'Who wrote the post "{post.title}" in the forum {post.forum}, and on which date? '
            "Give the date as yyyy-mm-dd.",
            says_all(post.author, post.created),
            [*to_post(post.forum, post.title), stop(f"{post.author}, {post.created}")],
        )


@TASKS.template
def extreme_post(world: TaskWorld) -> Iterator[TaskDraft]:
    for forum in world.rows(FORUMS):
        for words, label, key in (
            ("with the highest score", "Top", "score"),
            ("that is the newest", "New", "created"),
        ):
            author = world.value(
                f"SELECT author FROM ({POSTS}) WHERE forum_id = :forum_id ORDER BY {key} DESC, id",
                forum,
            )
            yield TaskDraft(
                f"Who is the author of the post in the forum {forum.forum} {words}? Answer with "
                "the username only.",
                says(author),
                [*to_forum(forum.forum), link(label), stop(author)],
            )


@TASKS.template
def comment_count(world: TaskWorld) -> Iterator[TaskDraft]:
    for post in world.some(40, f"SELECT * FROM ({POSTS}) WHERE num_comments > 2 ORDER BY id"):
        num = world.value(
            "SELECT count(*) AS num FROM comment WHERE post_id = :id AND score < 0", post
        )
        yield TaskDraft(
            f'How many comments on the post "{post.title}" in the forum {post.forum} have a '
            "score below zero? Answer with the number only.",
            says(num),
            [*to_post(post.forum, post.title), stop(num)],
        )


@TASKS.template
def commenters(world: TaskWorld) -> Iterator[TaskDraft]:
    for post in world.some(
        40, f"SELECT * FROM ({POSTS}) WHERE num_comments BETWEEN 1 AND 4 ORDER BY id"
    ):
        people = world.column(
            "SELECT user.name FROM comment JOIN user ON user.id = author_id WHERE post_id = "
            ":id ORDER BY comment.id",
            post,
        )
        yield TaskDraft(
            f'List the users who commented on the post "{post.title}" in the forum {post.forum}.',
            says_all(*people),
            [*to_post(post.forum, post.title), stop(", ".join(people))],
        )


@TASKS.template
def subscriber_count(world: TaskWorld) -> Iterator[TaskDraft]:
    for forum in world.rows(FORUMS):
        for second in world.some(
            3,
            "SELECT name AS other, :num_subscribers + num_subscribers AS num FROM forum WHERE "
            "id > :forum_id ORDER BY id",
            forum,
        ):
            yield TaskDraft(
                f"How many subscribers do the forums {forum.forum} and {second.other} have "
                "together? Answer with the number only.",
                says(second.num),
                [link("Forums"), stop(second.num)],
            )


@TASKS.template
def best_comment(world: TaskWorld) -> Iterator[TaskDraft]:
    for user in world.rows("SELECT id AS user_id, name FROM user WHERE id > 1 ORDER BY id"):
        scores = world.column(
            "SELECT score FROM comment WHERE author_id = :user_id ORDER BY score DESC", user
        )
        if len(scores) > 1 and scores[0] > scores[1]:
            forum = world.value(
                "SELECT forum.name FROM comment JOIN post ON post.id = post_id JOIN forum "
                "ON forum.id = forum_id WHERE comment.author_id = :user_id "
                "ORDER BY comment.score DESC",
                user,
            )
            yield TaskDraft(
                f"In which forum did the user {user.name} write the comment with the highest "
                "score? Answer with the forum's name only.",
                says(forum),
                [link("Users"), link(user.name), stop(forum)],
            )


@TASKS.template
def sorted_forum(world: TaskWorld) -> Iterator[TaskDraft]:
    for forum in world.rows(FORUMS):
        for words, label, key in (
            ("the newest", "New", "new"),
            ("the most commented", "Most commented", "comments"),
            ("the highest scored", "Top", "top"),
        ):
            yield TaskDraft(
                f"Show me the posts of the forum {forum.forum} with {words} ones first.",
                ends_at(f"{HOST}/f/{forum.forum}?sort={key}"),
                [*to_forum(forum.forum), link(label), stop()],
            )


@TASKS.template
def open_post(world: TaskWorld) -> Iterator[TaskDraft]:
    for forum in world.rows(FORUMS):
        for words, label, key in (
            ("most commented", "Most commented", "num_comments"),
            ("newest", "New", "created"),
            ("highest scored", "Top", "score"),
        ):
            posts = f"(SELECT * FROM ({POSTS}) WHERE forum_id = :forum_id)"
            best = f"SELECT * FROM {posts} WHERE {key} = (SELECT max({key}) FROM {posts})"
            for post in world.only(best, forum):
                yield TaskDraft(
                    f"Open the {words} post of the forum {post.forum}.",
                    ends_at(f"{HOST}/f/{post.forum}/{post.id}/post.html"),
                    [*to_forum(post.forum), link(label), link(post.title), stop()],
                )


@TASKS.template
def write_post(world: TaskWorld) -> Iterator[TaskDraft]:
    number = world.value("SELECT max(id) + 1 FROM post")
    for forum in world.rows(FORUMS):
        for start in world.random.sample(WORDS["tasks"]["titles"], 2):
            topic = world.random.choice(WORDS["forums"][forum.forum])
            body = world.random.choice(WORDS["tasks"]["texts"])
            title = f"{start}: {topic}"
            page = f"{HOST}/f/{forum.forum}/{number}/post.html"
            yield TaskDraft(
                f'Submit a post to the forum {forum.forum} with the title "{title}" and the text '
                f'"{body}"',
                shows(reads(page, "title", title), reads(page, "body", body)),
                [
                    *to_forum(forum.forum),
                    link("Submit a post"),
                    fill("Title", title),
                    fill("Text", body),
                    button("Publish"),
                    stop(),
                ],
            )


@TASKS.template
def write_comment(world: TaskWorld) -> Iterator[TaskDraft]:
    for post in world.some(40, POSTS):
        text = world.random.choice(WORDS["tasks"]["own_replies"])
        yield TaskDraft(
            f'Comment on the post "{post.title}" in the forum {post.forum}: "{text}"',
            holds(f"{HOST}/f/{post.forum}/{post.id}/post.html", "comments", text),
            [*to_post(post.forum, post.title), fill("Your comment", text), button("Reply"), stop()],
        )


@TASKS.template
def vote_post(world: TaskWorld) -> Iterator[TaskDraft]:
    for post in world.some(40, POSTS):
        verb, change = world.random.choice(WORDS["tasks"]["votes"])
        yield TaskDraft(
            f'{verb} the post "{post.title}" in the forum {post.forum}.',
            reads(f"{HOST}/f/{post.forum}/{post.id}/post.html", "score", post.score + change),
            [*to_post(post.forum, post.title), button(verb), stop()],
        )


@TASKS.template
def subscribe(world: TaskWorld) -> Iterator[TaskDraft]:
    for forum in world.rows(FORUMS):
        for words in ("Subscribe to the forum", "Make me a subscriber of the forum"):
            yield TaskDraft(
                f"{words} {forum.forum}.",
                holds(f"{HOST}/", "subscribed", forum.forum),
                [*to_forum(forum.forum), button("Subscribe"), stop()],
            )


@TASKS.template
def set_bio(world: TaskWorld) -> Iterator[TaskDraft]:
    me = world.value("SELECT name AS me FROM user WHERE id = 1")
    for bio in WORDS["tasks"]["bios"]:
        town = world.random.choice(WORDS["tasks"]["towns"])
        text = f"{bio} from {town}"
        yield TaskDraft(
            f'Set my biography to "{text}".',
            reads(f"{HOST}/user/{me}", "bio", text),
            [link("Edit biography"), fill("Biography", text), button("Save biography"), stop()],
        )


@TASKS.template
def new_forum(world: TaskWorld) -> Iterator[TaskDraft]:
    for topic in world.random.sample(WORDS["tasks"]["topics"], 5):
        town = world.random.choice(WORDS["tasks"]["towns"])
        suffix = world.random.randrange(10, 100)
        name = f"{topic}{suffix}"
        text = f"For friends of {topic} in {town}"
        yield TaskDraft(
            f'Create a forum called {name} with the description "{text}".',
            reads(f"{HOST}/f/{name}", "description", text),
            [
                link("Forums"),
                link("Create a forum"),
                fill("Name", name),
                fill("Description", text),
                button("Create forum"),
                stop(),
            ],
        )
