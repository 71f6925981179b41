#include "reports/writer/style.hpp"

namespace lockstep::reports {

const std::string_view kStyle = R"css(
:root{
  color-scheme:light dark;
  --bg:#f6f7f8;--card:#fff;--ink:#171b20;--soft:#545e69;--line:#dfe3e7;--faint:#eef0f2;
  --pass:#00704f;--fail:#b8370e;--skipped:#7a5a00;--error:#93307c;--recorded:#44586b;
  --pass-bg:#e3f2ec;--fail-bg:#fbe8e0;--skipped-bg:#f8efd6;--error-bg:#f6e4f1;--recorded-bg:#e7edf2;
  --c0:#0066a8;--c1:#c8500a;--c2:#00855f;--c3:#a8478a;--c4:#a37200;--c5:#3b8fc4;--c6:#5b5f66;--c7:#7652b8;
  --mono:ui-monospace,"SF Mono",SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
}
@media (prefers-color-scheme:dark){:root{
  --bg:#121518;--card:#1a1e22;--ink:#e7eaed;--soft:#a0abb5;--line:#30373e;--faint:#242a30;
  --pass:#46c79d;--fail:#ff9166;--skipped:#e3bd55;--error:#e79bd6;--recorded:#a4b8ca;
  --pass-bg:#15302a;--fail-bg:#3b2018;--skipped-bg:#322a14;--error-bg:#351f32;--recorded-bg:#222c36;
  --c0:#5db3ee;--c1:#f58b4c;--c2:#3fc795;--c3:#e08cc4;--c4:#e0b23e;--c5:#9ad0f5;--c6:#b4bac2;--c7:#b39af0;
}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1280px;margin:0 auto;padding:20px 24px 48px}
h1,h2,h3,p,figure,dl,dd,pre{margin:0}
h2{font-size:17px;font-weight:650;margin:34px 0 10px;letter-spacing:-.005em}
h3{font-size:12px;font-weight:600;color:var(--soft);margin:18px 0 6px}
a{color:inherit}
code,pre,.mono{font-family:var(--mono);font-size:.92em}
.soft{color:var(--soft)}
.card{background:var(--card);border:1px solid var(--line);border-radius:6px}
.n{text-align:right;white-space:nowrap}

.verdict{border-left:8px solid var(--tone);padding:20px 24px 18px;background:var(--tone-bg);border-radius:4px}
.verdict .name{display:flex;flex-wrap:wrap;gap:4px 14px;justify-content:space-between;color:var(--soft);font-size:13px}
.verdict .name b{color:var(--ink);font-weight:600}
.verdict h1{font-size:clamp(34px,5.4vw,54px);line-height:1.08;font-weight:720;letter-spacing:-.025em;color:var(--tone);margin:10px 0 8px}
.verdict .sentence{font-size:18px;line-height:1.4;max-width:62em;overflow-wrap:anywhere}.whole{white-space:nowrap}
.tally{display:flex;height:8px;margin:18px 0 8px;gap:2px}
.tally span{background:var(--tone);min-width:3px;border-radius:1px}
.counts{display:flex;flex-wrap:wrap;gap:3px 20px;font-size:13px;margin-top:14px}
.tally+.counts{margin-top:0}
.counts .mark{margin-right:5px}
.pass{--tone:var(--pass);--tone-bg:var(--pass-bg)}
.fail{--tone:var(--fail);--tone-bg:var(--fail-bg)}
.skipped{--tone:var(--skipped);--tone-bg:var(--skipped-bg)}
.error{--tone:var(--error);--tone-bg:var(--error-bg)}
.recorded{--tone:var(--recorded);--tone-bg:var(--recorded-bg)}
.mark{color:var(--tone);font-weight:650;white-space:nowrap}
.mark svg{width:10px;height:10px;margin-right:5px;vertical-align:-.5px;fill:none;stroke:currentColor;stroke-width:2;stroke-linecap:round;stroke-linejoin:round}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;margin:12px 0 0;font-size:13px;color:var(--soft)}
nav a{text-underline-offset:3px;text-decoration-color:var(--line)}
nav a:hover{color:var(--ink)}

table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:5px 10px;text-align:left;vertical-align:baseline}
thead th{font-size:11.5px;font-weight:600;color:var(--soft);border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:bottom}
tbody tr+tr>*,tbody+tbody tr:first-child>*{border-top:1px solid var(--faint)}
tbody th{font-weight:400}
tbody tr.more>*{border-top:0;padding-top:0}
.scroll{overflow-x:auto}
.what{font-weight:600;overflow-wrap:anywhere}
.metric{color:var(--soft);white-space:nowrap}
.sides{color:var(--soft);overflow-wrap:anywhere}
td.value{font-weight:600}
td.value .soft{font-weight:400}
tr.fail>td.value,tr.error>td.value{color:var(--tone)}
.divergence{font-family:var(--mono);font-size:12px;overflow-wrap:anywhere;display:block;margin:1px 0 3px}
.reason{display:block;overflow-wrap:anywhere}

.bar{display:inline-block;position:relative;width:100%;min-width:90px;height:9px;background:var(--faint);vertical-align:0;print-color-adjust:exact;-webkit-print-color-adjust:exact}
.bar i{position:absolute;left:0;top:0;bottom:0;width:var(--v);background:var(--tone)}
.bar::after{content:"";position:absolute;left:66.667%;top:-3px;bottom:-3px;width:1.5px;background:var(--ink)}
.bar b{position:absolute;top:-2px;bottom:-2px;left:var(--f);width:0;border-left:1.5px dashed var(--soft)}
.bar.off::after,.bar.nil::after{content:none}
.bar.off i{width:100%;background:repeating-linear-gradient(135deg,var(--tone) 0 3px,transparent 3px 6px)}
.ratio{display:grid;grid-template-columns:minmax(90px,1fr) 50px;gap:8px;align-items:baseline}
.ratio span:last-child{text-align:right;font-size:12px;white-space:nowrap}
.scale{display:block;position:relative;height:12px;margin-right:58px;font-weight:400;font-size:10.5px}
.scale span{position:absolute;transform:translateX(-50%)}
.scale span:first-child{transform:none}.scale span:last-child{transform:translateX(-100%)}

details>summary{cursor:pointer;list-style:none}
details>summary::-webkit-details-marker{display:none}
details>summary::before{content:"";display:inline-block;width:0;height:0;border:4px solid transparent;border-left:5.5px solid var(--soft);border-right:0;margin-right:6px;transition:transform .1s}
details[open]>summary::before{transform:rotate(90deg)}
summary:focus-visible,a:focus-visible,button:focus-visible,input:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
.more details>summary{color:var(--soft);font-size:12px}
.fold>summary{padding:2px 0 8px;color:var(--soft)}
.inner{margin:6px 0 8px;padding-left:12px;border-left:2px solid var(--line)}
.inner table{width:auto;min-width:min(100%,560px);font-size:12px}
.inner th,.inner td{padding:2.5px 14px 2.5px 0}
.inner .ratio{grid-template-columns:110px 50px}
.inner h3{margin:8px 0 2px}

.scenarios{overflow:hidden}
.scenario+.scenario{border-top:1px solid var(--line)}
.scenario>summary{display:grid;grid-template-columns:10px 92px minmax(0,1fr) 118px 210px 70px;gap:2px 12px;align-items:baseline;padding:9px 14px}
.scenario>summary::before{margin:0;align-self:center}
.scenario>summary:hover{background:var(--faint)}
.scenario>summary .title b{font-weight:650}
.scenario>summary .title span{color:var(--soft);margin-left:8px}
.scenario[open]>summary{background:var(--faint)}
.scenario .body{padding:4px 14px 16px}
.scenario.fail>summary,.scenario.error>summary{box-shadow:inset 3px 0 var(--tone)}
.meta{display:flex;flex-wrap:wrap;gap:2px 18px;font-size:12px;color:var(--soft);margin:6px 0 4px}
.tell{margin:8px 0;padding:7px 12px;background:var(--tone-bg);border-left:3px solid var(--tone);overflow-wrap:anywhere}
.compare{table-layout:fixed}
.compare .inner table{table-layout:auto}
.no-limit>*>tr>.k-limit,.no-limit>*>tr>.k-ratio,.no-floor>*>tr>.k-floor,.no-rank>*>tr>.k-rank{display:none!important}
.compare .k-status{width:98px}.compare .k-sides{width:23%}.compare .k-value{width:104px}.compare .k-limit{width:92px}.compare .k-ratio{width:210px}.compare .k-floor{width:88px}.compare .k-rank{width:54px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:18px 24px;margin:14px 0 0}
.charts.wide{grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr))}

.chart{min-width:0;position:relative}
.chart figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline;font-size:13px;margin-bottom:4px}
.chart figcaption b{font-weight:600}
.legend{display:flex;flex-wrap:wrap;gap:0 12px;font-size:12px}
.legend>span{overflow-wrap:anywhere}
.swatch{margin-right:4px;vertical-align:-1.5px}
.chart>svg{display:block;width:100%;height:auto;overflow:visible}
.chart text{font-family:inherit;font-size:11px;fill:var(--soft)}
.chart text.tick{font-size:10.5px}
.chart text.limit{fill:var(--fail)}
.grid{stroke:var(--line);stroke-width:.8;fill:none}
.grid.minor{stroke:var(--faint)}
.axis,.break{stroke:var(--soft);stroke-width:1;fill:none}
.break{stroke-width:.9}
.l{fill:none;stroke:var(--c);stroke-width:1.5;stroke-linejoin:round;stroke-linecap:round}
.l.again{stroke-dasharray:.1 3.4;stroke-width:2}
.m{fill:var(--c);stroke:var(--card);stroke-width:.8}
.m.hollow{fill:var(--card);stroke:var(--c);stroke-width:1.3}
.col{fill:var(--c)}
.band{fill:var(--c);opacity:.16}
.floor{fill:none;stroke:var(--c);stroke-width:1.2;stroke-dasharray:4 3;opacity:.75}
path.limit{stroke:var(--fail);stroke-width:1.1;fill:none}
.bad{stroke:var(--fail);stroke-width:1.6;fill:none}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}
.note{font-size:12px;color:var(--soft);margin-top:4px}
.data{font-size:12px;margin-top:3px}
.data>summary{color:var(--soft);display:inline-block}
.data .scroll{max-height:260px;overflow:auto;margin-top:4px}
.data table{font-size:12px;width:auto}
.data th,.data td{padding:1.5px 14px 1.5px 0}
.data thead th{position:sticky;top:0;background:var(--card)}
.guide{stroke:var(--soft);stroke-width:1}
.tip{position:absolute;z-index:3;pointer-events:none;background:var(--ink);color:var(--bg);font-size:12px;line-height:1.4;padding:5px 9px;border-radius:4px;max-width:300px;white-space:nowrap}

.env{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:0 32px;padding:8px 14px 10px}
.env div{display:grid;grid-template-columns:112px minmax(0,1fr);gap:10px;padding:4px 0;border-bottom:1px solid var(--faint);font-size:13px}
.env dt{color:var(--soft)}
.env dd{overflow-wrap:anywhere}
.command{display:flex;gap:12px;align-items:flex-start;padding:10px 14px;margin-bottom:10px}
.command pre{flex:1;white-space:pre-wrap;overflow-wrap:anywhere;font-size:12.5px}
button,input{font:inherit;font-size:13px;color:inherit;background:var(--card);border:1px solid var(--line);border-radius:4px;padding:3px 9px}
button{cursor:pointer}
thead button{all:unset;cursor:pointer;font:inherit}
thead button:hover{color:var(--ink)}
th[aria-sort] button::after{content:" \2193"}th[aria-sort=ascending] button::after{content:" \2191"}
.key{font-size:12px;color:var(--soft);margin:-4px 0 10px}
.key i{display:inline-block;height:11px;border-left:1.5px solid var(--ink);margin:0 4px 0 2px;vertical-align:-1px}
.key i+i,.key i.noise{border-left:1.5px dashed var(--soft)}
.tools{display:flex;flex-wrap:wrap;gap:8px;margin:0 0 10px;align-items:center}
.tools input{flex:0 1 280px;min-width:0}
.tools button[aria-pressed=true]{border-color:var(--ink);font-weight:600}
[hidden]{display:none!important}
.visually-hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
footer{margin-top:34px;font-size:12px;color:var(--soft)}

@media screen and (max-width:1100px){
  .compare .k-status{width:84px}.compare .k-ratio{width:150px}.compare .k-value{width:88px}.compare .k-limit{width:74px}
  .compare .ratio{grid-template-columns:minmax(60px,1fr) 44px}.compare .bar{min-width:60px}.scale{margin-right:52px}
}
@media screen and (max-width:760px){
  main{padding:0 12px 32px}
  .verdict{margin:0 -12px;border-radius:0;padding:18px 14px 14px}
  .verdict .sentence{font-size:16px}
  .scenario>summary{grid-template-columns:10px minmax(0,1fr) auto auto;padding:9px 12px}
  .scenario>summary::before{grid-row:1}
  .scenario>summary>.mark{grid-column:2;grid-row:1}
  .scenario>summary>.count{grid-column:3;grid-row:1}
  .scenario>summary>.time{grid-column:4;grid-row:1}
  .scenario>summary>.title{grid-column:2/-1;grid-row:2}
  .scenario>summary>.title span{display:block;margin:0}
  .scenario>summary>.worst{grid-column:2/-1;grid-row:3}
  .scenario .body{padding:2px 12px 14px}
  .card.table{padding:2px 12px}
  .compare,.compare>tbody{display:block}
  .compare>thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
  .compare>tbody>tr{display:grid;grid-template-columns:92px minmax(0,1fr) auto;gap:1px 8px;padding:7px 0 5px}
  .compare>tbody>tr>*{padding:0;display:block}
  .compare>tbody>tr>[class]{width:auto}
  .compare>tbody>tr+tr>*{border:0}
  .compare>tbody>tr+tr:not(.more){border-top:1px solid var(--line)}
  .compare>tbody>tr.more{display:block;padding:0 0 7px}
  .compare>tbody>tr.more>.k-status{display:none}
  .compare>tbody>tr>.k-status{grid-row:1;grid-column:1}
  .compare>tbody>tr>.k-what{grid-row:1;grid-column:2/4}
  .compare>tbody>tr>.k-sides{grid-column:1/4;font-size:12px}
  .compare>tbody>tr>.k-value{grid-column:1/3;text-align:left}
  .compare>tbody>tr>.k-limit{grid-column:3}
  .compare>tbody>tr>.k-ratio{grid-column:1/4;padding:2px 0}
  .compare>tbody>tr>.k-floor{grid-column:1/3;text-align:left}
  .compare>tbody>tr>.k-rank{grid-column:3}
  .compare>tbody>tr>td[data-label]:not(:empty)::before{content:attr(data-label) " ";color:var(--soft)}
  .compare>tbody>tr>td:empty{display:none}
  .inner{overflow-x:auto;padding-left:8px}
  .inner .ratio{grid-template-columns:64px 46px}
  .inner .bar{min-width:64px}
  .chart text{font-size:12px}.chart text.tick{font-size:11.5px}.chart.wide text,.chart.wide text.tick{font-size:16px}
  .env div{grid-template-columns:104px minmax(0,1fr)}
}
@media print{
  :root{color-scheme:light}
  body{background:#fff;font-size:10px}
  table,.inner table,.meta,.note,.chart figcaption,.legend,.counts,.env div{font-size:9.5px}
  thead th,.ratio span:last-child,.divergence,.key,h3,footer{font-size:9px}
  .verdict h1{font-size:30px}.verdict .sentence{font-size:13px}h2{font-size:13px;margin:18px 0 6px}
  th,td{padding:3px 5px}
  .compare .k-status{width:66px}.compare .k-value{width:74px}.compare .k-limit{width:62px}.compare .k-ratio{width:136px}.compare .k-floor{width:62px}.compare .k-rank{width:34px}
  .ratio{grid-template-columns:minmax(60px,1fr) 40px;gap:4px}.bar{min-width:60px;height:7px}.scale{margin-right:44px;font-size:8px}
  .scenario>summary{grid-template-columns:8px 64px minmax(0,1fr) 84px 136px 48px;gap:2px 8px;padding:6px 8px}
  .scenario .body{padding:2px 8px 10px}
  .charts,.charts.wide{grid-template-columns:1fr 1fr;gap:10px 16px}
  main{max-width:none;padding:0}
  nav,.tools,.command button,.data,footer .screen{display:none}
  .card{border-color:#bbb}
  .verdict,.tally span,.tell{print-color-adjust:exact;-webkit-print-color-adjust:exact}
  .scenario>summary,.chart,tr{break-inside:avoid}
  h2{break-after:avoid}
  .scroll{overflow:visible}.scroll>table{font-size:8.5px}.scroll th,.scroll td{padding:2px 3px}
  .scenario::details-content,.more details::details-content,.fold::details-content{content-visibility:visible;display:block}
}
)css";

const std::string_view kScript = R"js(
(function(){
'use strict';
var all=function(s,r){return Array.prototype.slice.call((r||document).querySelectorAll(s))};
function make(tag,text,parent){var e=document.createElement(tag);if(text)e.textContent=text;if(parent)parent.appendChild(e);return e}

// Filter over scenarios and comparisons.
var tools=document.getElementById('tools');
if(tools){
  tools.hidden=false;
  var input=tools.querySelector('input'),buttons=all('button',tools),status='',timer=0,opened=null;
  var found=make('span','',tools);found.className='soft';found.setAttribute('role','status');
  var apply=function(){
    var words=input.value.toLowerCase().split(/\s+/).filter(Boolean),on=words.length>0||status!=='',shown=0;
    if(on&&!opened)opened=all('.scenario').map(function(d){return d.open});
    all('.scenario').forEach(function(d,i){
      var head=d.querySelector('summary').textContent.toLowerCase(),own=words.every(function(w){return head.indexOf(w)>=0});
      var any=false,rows=all('.compare>tbody>tr:not(.more)',d);
      rows.forEach(function(r){
        var text=head+' '+r.textContent.toLowerCase();
        var ok=words.every(function(w){return text.indexOf(w)>=0})&&(!status||r.classList.contains(status));
        r.hidden=!ok;var m=r.nextElementSibling;if(m&&m.classList.contains('more'))m.hidden=!ok;
        if(ok){any=true;shown++}
      });
      var keep=any||(own&&(!status||d.classList.contains(status)));
      d.hidden=on&&!keep;
      if(on)d.open=keep;else if(opened)d.open=opened[i];
    });
    if(!on)opened=null;
    found.textContent=on?shown+(shown===1?' comparison':' comparisons'):'';
  };
  input.addEventListener('input',function(){clearTimeout(timer);timer=setTimeout(apply,120)});
  buttons.forEach(function(b){b.addEventListener('click',function(){
    if(b.dataset.open){var open=b.dataset.open==='1';all('.scenario').forEach(function(d){d.open=open});return}
    status=b.getAttribute('aria-pressed')==='true'?'':b.dataset.status;
    buttons.forEach(function(o){if(o.dataset.status)o.setAttribute('aria-pressed',String(o.dataset.status===status))});
    apply();
  })});
}

// Sorting by a column; a row takes the row of details below it along.
all('table.sortable').forEach(function(table){
  all('thead th',table).forEach(function(th,column){
    if(!th.dataset.sort)return;
    var label=th.firstChild,button=document.createElement('button');button.type='button';
    th.insertBefore(button,label);button.appendChild(label);
    button.addEventListener('click',function(){
      var down=th.getAttribute('aria-sort')!=='descending';
      all('thead th',table).forEach(function(o){o.removeAttribute('aria-sort')});
      th.setAttribute('aria-sort',down?'descending':'ascending');
      var body=table.tBodies[0],groups=[];
      all('tr',body).forEach(function(r){
        if(r.parentNode!==body)return;
        if(r.classList.contains('more'))groups[groups.length-1].rows.push(r);
        else{var c=r.cells[column],k=c.dataset.key!==undefined?parseFloat(c.dataset.key):c.textContent.trim();groups.push({key:k,rows:[r]})}
      });
      groups.sort(function(a,b){
        var x=a.key,y=b.key,d;
        if(typeof x==='number'){if(isNaN(x))x=-1;if(isNaN(y))y=-1;d=x===y?0:y-x}else d=x<y?-1:x>y?1:0;
        if(typeof a.key!=='number')d=-d;
        return down?d:-d;
      });
      groups.forEach(function(g){g.rows.forEach(function(r){body.appendChild(r)})});
    });
  });
});

// Charts: the row of numbers nearest to the pointer.
all('.chart').forEach(function(chart){
  var svg=chart.querySelector(':scope>svg'),rows=all('.data tbody tr',chart);
  if(!rows.length)return;
  var names=all('.data thead th',chart).map(function(t){return t.textContent}),tip=null,guide=null;
  var clear=function(){if(tip){tip.remove();guide.remove();tip=guide=null}};
  svg.addEventListener('pointermove',function(event){
    var box=svg.getBoundingClientRect(),scale=box.width/svg.viewBox.baseVal.width,x=(event.clientX-box.left)/scale;
    if(x<+svg.dataset.left-6||x>+svg.dataset.right+6){clear();return}
    var best=rows[0],distance=1e9;
    rows.forEach(function(r){var d=Math.abs(+r.dataset.px-x);if(d<distance){distance=d;best=r}});
    if(!tip){tip=make('div','',chart);tip.className='tip';guide=document.createElementNS(svg.namespaceURI,'path');guide.setAttribute('class','guide');svg.insertBefore(guide,svg.firstChild)}
    guide.setAttribute('d','M'+best.dataset.px+' '+svg.dataset.top+'V'+svg.dataset.bottom);
    tip.textContent='';make('b',best.cells[0].textContent,tip);
    for(var i=1;i<best.cells.length;i++){var t=best.cells[i].textContent;if(t){make('br','',tip);tip.appendChild(document.createTextNode((names.length>2?names[i]+'  ':'')+t))}}
    var left=best.dataset.px*scale,host=chart.getBoundingClientRect();
    tip.style.top=(box.top-host.top+svg.dataset.top*scale)+'px';
    tip.style.left=left>box.width/2?'':(left+10)+'px';
    tip.style.right=left>box.width/2?(box.width-left+10)+'px':'';
  });
  svg.addEventListener('pointerleave',clear);
});

all('.command').forEach(function(c){
  if(!navigator.clipboard)return;
  var b=make('button','Copy',c);b.type='button';
  b.addEventListener('click',function(){navigator.clipboard.writeText(c.querySelector('pre').textContent).then(function(){b.textContent='Copied';setTimeout(function(){b.textContent='Copy'},1500)})});
});
window.addEventListener('beforeprint',function(){all('.scenario').forEach(function(d){d.open=true})});
var go=function(){var id=location.hash.slice(1),t=id&&document.getElementById(id);if(t&&t.tagName==='DETAILS')t.open=true};
window.addEventListener('hashchange',go);go();
})();
)js";

}  // namespace lockstep::reports
