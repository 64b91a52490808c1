#!/bin/bash
echo '<h1>Welcome</h1>' > page.html
