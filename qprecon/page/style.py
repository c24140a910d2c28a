"""The page's style sheet: light and dark by the reader's preference, one column that fits a phone."""

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--text:#1d2126;--dim:#5c6670;--line:#dfe3e6;--a:#0b62b8;--b:#b8570b;
--c:#1d7a45;--d:#7a3fa8;--warn:#8a4b00;--warnbg:#fff4e0}
@media (prefers-color-scheme:dark){:root{--bg:#14171a;--card:#1c2024;--text:#e6e9ec;--dim:#a0aab4;--line:#343b42;--a:#6fb1f5;
--b:#f0a05a;--c:#6fce97;--d:#c79af0;--warn:#ffc46b;--warnbg:#33281a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1rem 1rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:.6rem 0 .2rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.2rem 0 .6rem}
h2.run{border-top:1px solid var(--line);padding-top:1.4rem;overflow-wrap:anywhere}
h3{font-size:1.05rem;margin:1.6rem 0 .4rem}
p{margin:.5rem 0}.dim,figcaption small{color:var(--dim)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem;margin:1rem 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.7rem .9rem}
.tile b{display:block;font-size:1.35rem;line-height:1.3;font-variant-numeric:tabular-nums}
.tile span{color:var(--dim);font-size:.86rem;line-height:1.3;display:block}
figure{background:var(--card);border:1px solid var(--line);border-radius:.6rem;margin:1rem 0;padding:.8rem .9rem}
figcaption{font-weight:600}
.scroll{overflow-x:auto}
svg.wide{width:100%;height:auto;display:block}
svg.small{width:100%;max-width:38rem;height:auto;display:block}
svg text{fill:var(--text);font-size:12px}svg text.note{fill:var(--dim)}
.grid{stroke:var(--line)}.axis{stroke:var(--dim)}.stem{stroke:var(--line);stroke-width:2}
.limit{stroke:var(--dim);stroke-dasharray:5 4}.bar{fill:var(--a)}
.a{fill:var(--a)}.b{fill:none;stroke:var(--b);stroke-width:1.6}.c{fill:var(--c)}.d{fill:var(--d)}
.keys{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:.2rem 0 .4rem;font-size:.9rem;color:var(--dim)}
.key{overflow-wrap:anywhere}.key svg{width:.9rem;height:.9rem;vertical-align:-.1rem;margin-right:.35rem}
table{border-collapse:collapse;margin:.4rem 0 1rem;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.35rem .7rem .35rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}
td.w{overflow-wrap:anywhere}
table.facts th{font-weight:400;color:var(--dim);width:11rem}
ul.warn{background:var(--warnbg);color:var(--warn);border-radius:.6rem;padding:.7rem .9rem .7rem 1.9rem;margin:1rem 0}
details{margin:1rem 0}summary{cursor:pointer;font-weight:600}
pre{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.8rem;overflow-x:auto;font-size:.85rem}
table.runs th:first-child{font-weight:400;color:var(--dim);min-width:7.5rem}
@media (max-width:40rem){table.facts th{width:8rem}main{padding:.6rem .8rem 2rem}figure{padding:.7rem .5rem}
svg.wide text{font-size:20px}svg.small text{font-size:15px}
svg.wide :is(.a,.b,.c,.d){transform-box:fill-box;transform-origin:center;transform:scale(1.6)}}
"""
