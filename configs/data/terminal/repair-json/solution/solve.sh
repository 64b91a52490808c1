cat > settings.json <<'END'
{"name": "store", "port": 8080, "paths": ["/a", "/b"], "limits": {"users": 25, "rate": 1.5}}
END
