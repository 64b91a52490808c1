"""Which addresses may be visited."""

from envhub.web.site_tasks.env import may_go


def test_may_go_compares_host_and_port():
    test = may_go({"a.test", "10.0.0.1:7770"})
    assert [
        test(url)
        for url in ("http://a.test/x", "https://A.test", "http://10.0.0.1:7770/", "http://a.test:1/",
                    "http://a.test@b.test/", "file:///etc/passwd", "javascript:1", "http://[")
    ] == [True, True, True, False, False, False, False, False]  # fmt: skip
