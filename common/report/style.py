"""The style sheet of report.html: system fonts, light and dark, one column on a phone."""

CSS = """
:root{color-scheme:light dark;--bg:#f6f6f3;--card:#fff;--ink:#1c1e21;--dim:#666b73;--line:#e4e4df;
--c1:#2563c9;--c2:#8a9099;--c3:#c2570c;--c4:#12805c;--c5:#8b3fb5;--good:#12805c;--bad:#b42318}
@media(prefers-color-scheme:dark){:root{--bg:#131517;--card:#1c1f23;--ink:#e9eaec;--dim:#9aa1aa;
--line:#2e3238;--c1:#6ea3ff;--c2:#8c939d;--c3:#f29a52;--c4:#4fc79a;--c5:#c58be6;--good:#4fc79a;
--bad:#ff8a7a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1080px;margin:0 auto;padding:28px 16px 48px}
header p,.note{color:var(--dim)}
h1{font-size:1.05rem;font-weight:600;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:.95rem;font-weight:600;margin:0 0 10px}
header p{margin:0 0 20px;font-size:.9rem}
.cards{display:flex;flex-wrap:wrap;gap:16px}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 18px 14px;
flex:1 1 440px;min-width:0}
.wide{flex-basis:100%}
.hero{font-size:2.6rem;font-size:clamp(2.1rem,8vw,3.6rem);line-height:1.1;font-weight:650;letter-spacing:-.02em;
font-variant-numeric:tabular-nums;margin:0 0 6px}
.hero .from,.hero .arrow{color:var(--dim);font-weight:500}
.gain{font-size:1.1rem;font-weight:600;margin:0}
.good{color:var(--good)}.bad{color:var(--bad)}
.facts{display:flex;flex-wrap:wrap;gap:8px 32px;margin:16px 0 4px;padding:0}
.facts div{min-width:84px}
.facts dt{color:var(--dim);font-size:.82rem}
.facts dd{margin:0;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.note{font-size:.84rem;margin:8px 0 0}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0 0;padding:0;list-style:none;
font-size:.86rem;font-variant-numeric:tabular-nums}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
svg{display:block;width:100%;max-width:560px;height:auto;overflow:visible}
svg text{font-size:13px;fill:var(--ink);font-family:inherit;font-variant-numeric:tabular-nums}
svg .dim{fill:var(--dim)}
.grid{stroke:var(--line);stroke-width:1}
.rule{stroke:var(--dim);stroke-width:1;stroke-dasharray:2 4}
.line{fill:none;stroke-width:2.4;stroke-linejoin:round;stroke-linecap:round}
.faint{opacity:.32;stroke-width:1.4}.dot{stroke-width:7}
.ref{stroke-width:1.5;stroke-dasharray:5 5}
.mark line{stroke-width:2}.mark circle{stroke:var(--card);stroke-width:2}
.table{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px 6px 0;text-align:right;border-bottom:1px solid var(--line);
white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th{color:var(--dim);font-weight:500}tr:last-child td{border-bottom:0}
@media(max-width:480px){table{font-size:.8rem}th,td{padding-right:5px}main{padding:20px 12px}
.card{padding:16px 14px 12px}}
""" + "".join(
    f".line.c{i},.ref.c{i},.mark.c{i} line{{stroke:var(--c{i})}}"
    f".fill.c{i},svg .ink.c{i},.mark.c{i} circle{{fill:var(--c{i})}}"
    f".legend i.c{i}{{background:var(--c{i})}}\n"
    for i in range(1, 6)
)
