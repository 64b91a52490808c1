"""Accessibility trees as text."""

from envhub.web.tree import PageNode, agentgym_lines, compact_lines, cut, read_snapshot, shown_nodes


def row(parent, depth, role, name, states="", *, block=-1, in_view=1):
    return [parent, depth, role, name, states, "", "", block, 0, 0, 10, 10, in_view]


def nodes_of(*rows) -> tuple[PageNode, ...]:
    message = {"url": "http://a.test/", "title": "A", "rows": list(rows), "state": None}
    return read_snapshot(message).nodes


def test_lines_show_id_role_name_and_indented_states():
    nodes = nodes_of(
        row(-1, 0, "navigation", "Main"),
        row(0, 1, "link", "Orders"),
        row(1, 2, "StaticText", "Orders"),
        row(-1, 0, "checkbox", "Keep", "checked: false"),
    )
    assert agentgym_lines(shown_nodes(nodes, only_in_view=False)) == [
        "[0] navigation 'Main'",
        "\t[1] link 'Orders'",
        "[3] checkbox 'Keep' checked: false",
    ]


def test_shown_nodes_can_omit_nodes_out_of_view():
    nodes = nodes_of(row(-1, 0, "link", "Here"), row(-1, 0, "link", "Below", in_view=0))
    assert [n.name for n in shown_nodes(nodes, only_in_view=True)] == ["Here"]
    assert [n.name for n in shown_nodes(nodes, only_in_view=False)] == ["Here", "Below"]


def test_shown_nodes_leaves_out_nameless_structure():
    nodes = nodes_of(row(-1, 0, "list", ""), row(0, 1, "listitem", ""), row(1, 2, "button", ""))
    assert [n.role for n in shown_nodes(nodes, only_in_view=False)] == ["button"]


def test_compact_lines_put_a_table_row_on_one_line():
    nodes = nodes_of(
        row(-1, 0, "table", ""),
        row(0, 1, "row", ""),
        row(1, 2, "cell", "Mug"),
        row(1, 2, "cell", "Edit"),
        row(3, 3, "link", "Edit"),
        row(0, 1, "row", ""),
        row(5, 2, "cell", "Bowl"),
    )
    shown = shown_nodes(nodes, only_in_view=False)
    assert compact_lines(shown, nodes, ids=False) == ["Mug | [4] link 'Edit'", "Bowl"]


def test_compact_lines_join_texts_of_one_block():
    nodes = nodes_of(
        row(-1, 0, "StaticText", "Hello", block=1),
        row(-1, 0, "StaticText", "world", block=1),
        row(-1, 0, "StaticText", "Bye", block=2),
    )
    shown = shown_nodes(nodes, only_in_view=False)
    assert compact_lines(shown, nodes, ids=False) == ["Hello world", "Bye"]
    assert compact_lines(shown, nodes, ids=True) == ["[0] Hello", "[1] world", "[2] Bye"]


def test_compact_lines_drop_headings_repeated_by_their_links():
    nodes = nodes_of(row(-1, 0, "heading", "Mug"), row(0, 1, "link", "Mug"))
    shown = shown_nodes(nodes, only_in_view=False)
    assert compact_lines(shown, nodes, ids=False) == ["[1] link 'Mug'"]


def test_compact_lines_keep_the_target_around_a_node_of_its_name():
    for role in ("heading", "img"):
        nodes = nodes_of(
            row(-1, 0, "link", "Mug"), row(0, 1, role, "Mug"), row(-1, 0, "button", "Buy")
        )
        shown = shown_nodes(nodes, only_in_view=False)
        assert compact_lines(shown, nodes, ids=False) == ["[0] link 'Mug'", "[2] button 'Buy'"]


def test_cut_counts_the_lines_it_leaves_out():
    lines = ["one two", "three", "four", "five"]
    assert cut(lines, 3) == "one two\nthree\n... (2 more lines are not shown)"
    assert cut(lines, 5) == "one two\nthree\nfour\nfive"


def test_node_value_reads_quotes_and_backslashes():
    (node,) = nodes_of(row(-1, 0, "textbox", "Q", 'value: "say \\"hi\\" \\\\ now" focused: True'))
    assert node.value == 'say "hi" \\ now'
