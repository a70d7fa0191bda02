"""The style of the report's page, and the little script that reads values off its curves.

The page is whole without the script. Colours follow the reader's light or dark setting.

Invariant: nothing is loaded from anywhere: no font, no image, no script.
"""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root{color-scheme:light dark;--page:#fdfdfc;--text:#1d1d1b;--soft:#6b6a65;--hair:#e5e3dd;--track:#f3f2ee;
--line:#1f5f9f;--second:#c2571a;--stall:#b3261e;--line-soft:#1f5f9f2b}
@media (prefers-color-scheme:dark){:root{--page:#131312;--text:#e7e5e0;--soft:#99978f;--hair:#2d2c29;--track:#1c1c1a;
--line:#79b0ea;--second:#ee9a5f;--stall:#f0837a;--line-soft:#79b0ea30}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--text);font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1152px;margin:0 auto;padding:28px 16px 64px}
header p{margin:2px 0 0;color:var(--soft);overflow-wrap:anywhere}
h1{font-size:22px;line-height:1.25;font-weight:600;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
header .state{color:var(--text);margin-top:6px}
h2{font-size:15px;font-weight:600;margin:36px 0 10px;padding-top:10px;border-top:1px solid var(--hair)}
.notes{margin:14px 0 0;padding:8px 12px;border-left:3px solid var(--second);background:var(--track);list-style:none}
.figures{display:grid;grid-template-columns:repeat(5,minmax(0,1fr));gap:14px 20px;margin:22px 0 8px}
.figures div{min-width:0}
.figures dt{color:var(--soft);font-size:12px}
.figures dd{margin:0;font-size:19px;line-height:1.25;font-weight:500;letter-spacing:-.01em}
.figures small{display:block;color:var(--soft);font-size:12px;line-height:1.35;font-weight:400;letter-spacing:0}
.grid-of{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:18px 20px}
figure{margin:0 0 14px;min-width:0}
.grid-of figure{margin:0}
figcaption{display:flex;flex-wrap:wrap;gap:0 10px;align-items:baseline;font-size:13px;margin-bottom:2px}
figcaption b{font-weight:600}
figcaption .unit,.note{color:var(--soft);font-size:12px}
.note{margin:2px 0 0}
.last{margin-left:auto;font-size:13px}
.key{font-size:12px;color:var(--soft);white-space:nowrap}
.key i{display:inline-block;width:12px;height:3px;margin-right:4px;vertical-align:middle;background:var(--line)}
.key i.second{background:var(--second)}
.key i.busy{background:var(--line);height:8px;opacity:.45}
.key i.stalled{background:var(--stall);height:8px}
svg{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}
.narrow{display:none}
svg text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:var(--soft);
font-variant-numeric:tabular-nums}
svg .tick.y{text-anchor:end;dominant-baseline:central}
svg .tick.x{text-anchor:middle}
svg .unit{text-anchor:end}
svg .name,svg .value{dominant-baseline:central}
svg .name{fill:var(--text);font-size:12px}
svg .stall{fill:var(--stall)}
svg .grid{stroke:var(--hair);stroke-width:1;fill:none;shape-rendering:crispEdges}
svg .mark{stroke:var(--soft);stroke-width:1;shape-rendering:crispEdges}
svg .track{fill:var(--track)}
svg .line{stroke:var(--line);stroke-width:1.5;fill:none;stroke-linejoin:round;stroke-linecap:round}
svg .line.second{stroke:var(--second)}
svg .rule{stroke:var(--soft);stroke-width:1;stroke-dasharray:4 3;fill:none}
svg .band{fill:var(--line-soft);stroke:none}
svg .dot{fill:var(--line)}
svg .dot.second{fill:var(--second)}
svg .dot.big{stroke:var(--page);stroke-width:2;r:5px}
svg .label{text-anchor:end}
svg text.rule{stroke:none;fill:var(--soft)}
svg .busy{fill:var(--line);opacity:.45}
svg .stalled{fill:var(--stall)}
svg .cross{stroke:var(--text);stroke-width:1;opacity:.55;pointer-events:none}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:3px 14px 3px 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--hair);font-weight:400}
th:first-child{text-align:left}
td.left{text-align:left;padding-left:14px}
thead th{color:var(--soft);font-size:12px}
tbody tr:last-child>*{border-bottom:none}
tr.total th,tr.total td{font-weight:500}
.bars{width:38%;min-width:90px;text-align:left;padding-right:0}
.bar{display:block;height:5px;margin:1px 0;background:var(--line);border-radius:1px}
.bar.second{background:var(--second);opacity:.6}
.memory tr.total .bar{background:var(--second)}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:0}
.facts dt{color:var(--soft)}
.facts dd{margin:0;overflow-wrap:anywhere}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:8px 36px}
.columns>*{min-width:0}
pre{margin:0;font:12px/1.55 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre-wrap;
overflow-wrap:anywhere}
h3{font-size:13px;font-weight:600;margin:16px 0 6px}
details{margin-top:8px}
summary{cursor:pointer;color:var(--soft);font-size:13px}
#readout{position:fixed;left:0;right:0;bottom:0;padding:6px 16px;background:var(--track);font-size:13px;
border-top:1px solid var(--hair);display:none;overflow-wrap:anywhere}
#readout b{font-weight:600;margin-right:14px}
#readout span{margin-right:14px;white-space:nowrap}
footer{margin-top:40px;color:var(--soft);font-size:12px;border-top:1px solid var(--hair);padding-top:10px;
overflow-wrap:anywhere}
@media (max-width:1000px){.wide svg text{font-size:14px}.figures{grid-template-columns:repeat(3,minmax(0,1fr))}}
@media (max-width:640px){.wide{display:none}.narrow{display:block}main{padding:18px 16px 56px}
.figures{grid-template-columns:repeat(2,minmax(0,1fr))}.figures dd{font-size:17px}
.facts{grid-template-columns:1fr;gap:0}.facts dd{margin-bottom:6px}.bars{width:14%;min-width:36px}
th,td{padding-right:8px;white-space:normal}td{white-space:nowrap}
td.left{white-space:normal}th:first-child{overflow-wrap:break-word}
.operators tr{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));border-bottom:1px solid var(--hair)}
.operators th,.operators td{border-bottom:none}.operators th:first-child{grid-column:1/-1;padding-bottom:0}
.key i{width:8px}}
@media print{#readout{display:none!important}main{max-width:none}}
"""

SCRIPT: Final = """
(function(){
var table=JSON.parse(document.getElementById('steps').textContent);
var charts=[].slice.call(document.querySelectorAll('[data-low] svg'));
var readout=document.getElementById('readout');
if(!table.rows.length||!charts.length)return;
function frame(svg){var box=svg.closest('[data-low]'),d=box.dataset,w=svg.viewBox.baseVal.width;
return{low:+d.low,high:+d.high,left:+(svg.dataset.left||46),right:w-(+(svg.dataset.right||10)),width:w,
height:svg.viewBox.baseVal.height}}
function nearest(step){var rows=table.rows,low=0,high=rows.length-1;
while(high-low>1){var middle=(low+high)>>1;if(rows[middle][0]<=step)low=middle;else high=middle}
return Math.abs(rows[high][0]-step)<Math.abs(rows[low][0]-step)?rows[high]:rows[low]}
function show(row){charts.forEach(function(svg){var f=frame(svg),line=svg.querySelector('.cross');
if(!line){line=document.createElementNS('http://www.w3.org/2000/svg','path');line.setAttribute('class','cross');
svg.appendChild(line)}
var x=f.left+(row[0]-f.low)/(f.high-f.low)*(f.right-f.left);
line.setAttribute('d','M'+x+' 4V'+(f.height-22))});
readout.textContent='';
row.forEach(function(value,number){var item=document.createElement(number?'span':'b');
item.textContent=table.names[number]+' '+(value===null?'-':value);readout.appendChild(item)});
readout.style.display='block'}
function hide(){readout.style.display='none';
charts.forEach(function(svg){var line=svg.querySelector('.cross');if(line)line.remove()})}
charts.forEach(function(svg){
svg.addEventListener('pointermove',function(event){var f=frame(svg),box=svg.getBoundingClientRect();
var x=(event.clientX-box.left)/box.width*f.width;
show(nearest(f.low+(x-f.left)/(f.right-f.left)*(f.high-f.low)))});
svg.addEventListener('pointerleave',hide)});
})();
"""
