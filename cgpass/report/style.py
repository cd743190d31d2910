"""How the page of a report looks: no script, no font and no image from elsewhere."""

from typing import Final

CSS: Final = """
:root {
  color-scheme: light dark;
  --back: #fbfbfa; --panel: #ffffff; --text: #1d2430; --soft: #5b6472; --line: #e2e4e8;
  --graph: #2f6fb0; --graph-text: #ffffff; --plain: #d98a1f; --plain-text: #201500;
  --code: #f1f2f4; --good: #20744a; --warn: #9a5b00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14171c; --panel: #1b1f26; --text: #e4e7ec; --soft: #9aa4b2; --line: #2d333d;
    --graph: #5b9bd9; --graph-text: #0b1420; --plain: #e0a34a; --plain-text: #201500;
    --code: #232932; --good: #6cc495; --warn: #e6b366;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main { max-width: 72rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 0; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .25rem 0; }
.soft { color: var(--soft); }
.warn { color: var(--warn); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }
.tile {
  flex: 1 1 11rem; background: var(--panel); border: 1px solid var(--line); border-radius: .5rem;
  padding: .75rem 1rem;
}
.tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
section {
  background: var(--panel); border: 1px solid var(--line); border-radius: .5rem;
  padding: 1rem 1.25rem 1.25rem; margin: 1rem 0;
}
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .3rem .75rem;
  align-items: center; margin: .5rem 0 .75rem; }
.bars span { color: var(--soft); font-size: .85rem; white-space: nowrap; }
.bar { display: flex; gap: 1px; height: 1.75rem; }
.bar i {
  flex: 1 1 0; min-width: 2px; overflow: hidden; white-space: nowrap; text-overflow: clip;
  font: .75rem/1.75rem ui-monospace, "Cascadia Mono", Consolas, monospace; padding: 0 .15rem;
  text-align: center; border-radius: 2px;
}
.graph { background: var(--graph); color: var(--graph-text); }
.plain { background: var(--plain); color: var(--plain-text); }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px;
  vertical-align: -.05rem; margin: 0 .3rem 0 .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child, td.words, th.words { text-align: left; }
td.words { white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }
code { background: var(--code); padding: .05rem .3rem; border-radius: 3px; overflow-wrap: anywhere;
  font: .85em ui-monospace, "Cascadia Mono", Consolas, monospace; }
.reason { border-left: 3px solid var(--plain); padding: .1rem 0 .1rem .8rem; margin: .6rem 0;
  overflow-wrap: anywhere; }
.fix { color: var(--good); }
details { margin: .4rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
details > div { padding: .25rem 0 .5rem 1.1rem; }
"""
