// Draws the report from the JSON in #data: tables for everything, charts beside them where Chart.js
// is part of the page. Nothing depends on colour: series differ by shape, dash and fill pattern.
'use strict';

const data = JSON.parse(document.getElementById('data').textContent);
const hasCharts = typeof Chart !== 'undefined';
const inks = ['#0550ae', '#9a3412', '#1a7f37', '#6639ba', '#57606a'];
const shapes = ['circle', 'triangle', 'rect', 'crossRot', 'star'];
const dashes = [[], [7, 4], [2, 3], [10, 3, 2, 3], [1, 5]];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter(child => child !== null));
  return made;
}

function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
  return value.toLocaleString('en', {maximumFractionDigits: digits, minimumFractionDigits: digits});
}
const us = value => value >= 1000 ? `${number(value / 1000)} ms` : `${number(value, 1)} µs`;
const count = (n, what) => `${n} ${what}${n === 1 ? '' : 's'}`;
const device = key => key.replace(/, 1 threads$/, ', 1 thread');
const day = time => time.slice(0, 16).replace('T', ' ');
const percent = value => value === null ? '–' : `${number(100 * value, 1)}%`;

// A long key may be broken behind its separators.
const breakable = text =>
  text.split(/(?<=[/,])/).flatMap((piece, i) => i === 0 ? [piece] : [element('wbr'), piece]);

function cell(text, numeric) {
  if (numeric) return element('td', {class: 'number'}, text);
  return element('td', text.length > 20 ? {class: 'long'} : {}, ...breakable(text));
}

// columns: [title, row => text, is a number]
function table(caption, columns, rows) {
  const head = element('tr', {}, ...columns.map(([title, , numeric]) =>
    element('th', numeric ? {scope: 'col', class: 'number'} : {scope: 'col'}, title)));
  const body = rows.map(row => element('tr', {}, ...columns.map(([, text, numeric]) =>
    cell(String(text(row)), numeric))));
  return element('div', {class: 'wrap', tabindex: '0'}, element('table', {},
    element('caption', {}, caption), element('thead', {}, head), element('tbody', {}, ...body)));
}

// A fill that is told from the others without colour.
function pattern(index) {
  const size = 12, tile = document.createElement('canvas');
  tile.width = tile.height = size;
  const pen = tile.getContext('2d');
  pen.fillStyle = index === 0 ? inks[0] : '#ffffff';
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = pen.fillStyle = inks[index % inks.length];
  pen.lineWidth = 3;
  pen.beginPath();
  if (index === 1) {
    for (const shift of [-size, 0, size]) { pen.moveTo(shift, size); pen.lineTo(shift + size, 0); }
  } else if (index === 2) {
    pen.arc(size / 2, size / 2, 2.5, 0, 7);
    pen.fill();
  } else if (index > 2) {
    pen.moveTo(0, size / 2); pen.lineTo(size, size / 2);
  }
  pen.stroke();
  return pen.createPattern(tile, 'repeat');
}

// Charts that are to be drawn: place -> what draws it.
const undrawn = new Map();

// A chart, drawn by drawCharts() or when its place is first seen, since a hidden canvas has no size.
function chart(label, make) {
  if (!hasCharts) return null;
  const canvas = element('canvas', {role: 'img', 'aria-label': `${label}; the table beside it has the figures`});
  const place = element('div', {class: 'chart'}, canvas);
  undrawn.set(place, () => {
    const settings = make();
    settings.options = {responsive: true, maintainAspectRatio: false, animation: false,
                        ...settings.options};
    settings.options.plugins = {title: {display: true, text: label}, ...settings.options.plugins};
    new Chart(canvas, settings);
  });
  return place;
}

// Draws what is on the first screens at once, the rest when it comes into view or a second later, so
// that what nobody scrolled to is not missing in print. What is folded away waits until it is seen.
function drawCharts() {
  const draw = place => {
    undrawn.get(place)?.();
    undrawn.delete(place);
  };
  const observer = new IntersectionObserver(
    entries => entries.forEach(entry => entry.isIntersecting && draw(entry.target)));
  for (const place of [...undrawn.keys()]) {
    const {top, width} = place.getBoundingClientRect();
    if (width > 0 && top < 3 * window.innerHeight) draw(place);
    else observer.observe(place);
  }
  setTimeout(() => {
    for (const place of [...undrawn.keys()]) if (place.offsetParent !== null) draw(place);
  }, 1000);
}

const axis = (title, more = {}) => ({title: {display: true, text: title}, ...more});
const pair = (...parts) => element('div', {class: 'pair'}, ...parts.filter(part => part !== null));

function section(title, ...parts) {
  const id = title.toLowerCase().replaceAll(' ', '-');
  document.getElementById('contents').append(element('a', {href: `#${id}`}, title), ' ');
  document.getElementById('main').append(
    element('section', {id}, element('h2', {}, title), ...parts.filter(part => part !== null)));
}

const note = text => element('p', {class: 'soft'}, text);

function provenance() {
  const facts = [
    ['made', data.generated], ['on', data.host], ['by', `Wyvern ${data.version}`], ['from', data.cache],
    ['rows', `${data.counts.winners} winners, ${data.counts.measurements} measurements, ` +
             `${data.counts.artifacts} compiled kernels`],
  ];
  section('Provenance',
    table('This page', [['what', row => row[0]], ['', row => row[1]]], facts),
    table('Devices that were measured', [
      ['device', row => device(row.key)], ['drivers', row => row.drivers.join(', ')],
      ['hosts', row => row.hosts.join(', ') || '–'], ['GPU', row => row.units.join(', ') || '–'],
      ['clock, MHz', row => row.clocks.length ? row.clocks.map(c => number(c, 0)).join(' to ') : '–', true],
      ['power limit, W', row => row.power_limits.map(p => number(p, 0)).join(', ') || '–', true],
    ], data.devices));
}

const problemName = row => `${row.problem}`;

function overview() {
  const rows = data.problems;
  if (rows.length === 0) {
    section('Problems', note('Nothing is tuned yet: wyvern tune does it.'));
    return;
  }
  const bars = chart('Time relative to the default plan (the default is 1)', () => ({
    type: 'bar',
    data: {labels: rows.map((row, i) => `#${i + 1}`), datasets: [
      {label: 'tuned', data: rows.map(row => row.ratio), backgroundColor: pattern(0),
       borderColor: inks[0], borderWidth: 1},
      {label: 'roofline', data: rows.map(row => row.floor_us && row.default_us ?
                                             row.floor_us / row.default_us : null),
       backgroundColor: pattern(2), borderColor: inks[2], borderWidth: 1},
    ]},
    options: {scales: {y: axis('of the default', {beginAtZero: true}), x: axis('problem')}},
  }));
  section('Problems',
    note('Tuned and default were timed in turn, as whole operators; their ratio is the median over neighbouring ' +
         'samples. The roofline is the least time that arithmetic and memory allow, or the caches where they ' +
         'hold the tensors of a CPU. Regret is how much the stages of the plan, timed alone, would gain if each had ' +
         'the best config of its template that was measured.'),
    bars,
    table('Each problem that was tuned', [
      ['#', row => rows.indexOf(row) + 1, true], ['problem', problemName],
      ['tuned', row => us(row.tuned_us), true],
      ['default', row => row.default_us ? us(row.default_us) : '–', true],
      ['tuned / default', row => number(row.ratio), true],
      ['roofline', row => row.floor_us ? us(row.floor_us) : '–', true],
      ['of roofline', row => row.floor_us ? percent(row.floor_us / row.tuned_us) : '–', true],
      ['regret', row => percent(row.regret), true], ['device', row => device(row.device)],
      ['driver', row => row.driver], ['when', row => day(row.created)],
    ], rows));
}

function waterfall(row) {
  if (row.steps.every(step => step.us === 0)) return null;
  return pair(
    chart('Stages, one after another', () => ({
      type: 'bar',
      data: {labels: row.steps.map(step => step.template), datasets: [
        {label: 'stage alone', data: row.steps.map(step => [step.start_us, step.start_us + step.us]),
         backgroundColor: pattern(1), borderColor: inks[1], borderWidth: 1},
      ]},
      options: {indexAxis: 'y', plugins: {legend: {display: false}}, scales: {x: axis('µs')}},
    })),
    table('Stage waterfall: each kernel timed alone', [
      ['kernel', step => step.template], ['takes', step => step.us ? us(step.us) : '–', true],
      ['share', step => percent(step.share), true], ['from', step => us(step.start_us), true],
      ['best measured', step => step.best_us ? us(step.best_us) : '–', true],
      ['config', step => step.config],
    ], row.steps));
}

function tunable(group, name) {
  const rows = group.rows.filter(r => r.median_us > 0 && name in r.config);
  const values = [...new Set(rows.map(r => r.config[name]))].sort((a, b) => a - b || (a < b ? -1 : 1));
  if (values.length < 2) return null;
  const summary = values.map(value => {
    const times = rows.filter(r => r.config[name] === value).map(r => r.median_us).sort((a, b) => a - b);
    return {value, count: times.length, best: times[0], median: times[Math.floor(times.length / 2)]};
  });
  return pair(
    chart(`${group.template}: time against ${name}`, () => ({
      type: 'scatter',
      data: {datasets: [
        {label: 'a config', data: rows.map(r => ({x: values.indexOf(r.config[name]), y: r.median_us})),
         pointStyle: shapes[0], pointRadius: 4, borderColor: inks[0], backgroundColor: '#ffffff'},
        {label: 'the best', type: 'line', data: summary.map((s, i) => ({x: i, y: s.best})),
         pointStyle: shapes[1], pointRadius: 6, borderColor: inks[1], backgroundColor: inks[1],
         borderDash: dashes[1]},
      ]},
      options: {plugins: {legend: {labels: {usePointStyle: true}}}, scales: {
        x: axis(name, {min: -0.5, max: values.length - 0.5, ticks: {callback: at => String(values[at])},
                       afterBuildTicks: own => { own.ticks = values.map((_, value) => ({value})); }}),
        y: axis('µs', {beginAtZero: true})}},
    })),
    table(`${group.template}: ${name}`, [
      [name, s => s.value], ['configs', s => s.count, true], ['best', s => us(s.best), true],
      ['median', s => us(s.median), true],
    ], summary));
}

function track(row) {
  if (row.samples_us.length === 0) return null;
  const series = [['tuned', row.samples_us], ['default', row.default_samples_us]]
    .filter(([, samples]) => samples.length > 0);
  const clocks = row.clocks_mhz;
  const spread = samples => {
    const sorted = [...samples].sort((a, b) => a - b);
    return {least: sorted[0], median: sorted[Math.floor(sorted.length / 2)], most: sorted.at(-1)};
  };
  const line = (label, values, i, more) => ({
    label, data: values.map((y, x) => ({x, y})), pointStyle: shapes[i], pointRadius: 3,
    borderColor: inks[i], backgroundColor: inks[i], borderDash: dashes[i], borderWidth: 1.5,
    showLine: true, ...more});
  const rows = series.map(([name, samples]) => ({name, count: samples.length, ...spread(samples), text: us}));
  if (clocks.length) rows.push({name: 'clock', count: clocks.length, ...spread(clocks),
                                text: mhz => `${number(mhz, 0)} MHz`});
  return pair(
    chart('Samples in the order they were taken', () => ({
      type: 'scatter',
      data: {datasets: [
        ...series.map(([name, samples], i) => line(name, samples, i, {yAxisID: 'y'})),
        ...(clocks.length ? [line('clock', clocks, 2, {yAxisID: 'clock'})] : []),
      ]},
      options: {plugins: {legend: {labels: {usePointStyle: true}}}, scales: {
        x: axis('sample'), y: axis('µs'),
        ...(clocks.length ? {clock: axis('MHz', {position: 'right', grid: {drawOnChartArea: false}})} : {})}},
    })),
    table(clocks.length ? 'Samples and clock' : 'Samples; the clock was not watched', [
      ['', r => r.name], ['samples', r => r.count, true], ['least', r => r.text(r.least), true],
      ['median', r => r.text(r.median), true], ['most', r => r.text(r.most), true],
    ], rows));
}

function problems() {
  data.problems.forEach((row, i) => {
    const details = element('details', i === 0 ? {open: ''} : {},
      element('summary', {}, `#${i + 1} (${us(row.tuned_us)}) `, ...breakable(problemName(row))));
    const fill = () => {
      details.append(...[element('h3', {}, 'Stages'),
        waterfall(row) ?? note('No row of a stage is left of this tuning.'),
        element('h3', {}, 'Samples'), track(row) ?? note('This winner was stored without its samples.'),
        element('h3', {}, 'Tunables')]);
      const charts = row.templates.flatMap(group => group.tunables.map(name => tunable(group, name)))
        .filter(part => part !== null);
      details.append(...(charts.length ? charts : [note('No tunable was measured at two values.')]));
    };
    if (i === 0) fill();
    else details.addEventListener('toggle', fill, {once: true});
    document.getElementById('problems').append(details);
  });
}

function checks() {
  section('Errors',
    note('The largest rms error of an output, relative to the float64 oracle, of the configs that passed their check.'),
    table('By template', [
      ['template', row => row.template], ['configs', row => row.count, true],
      ['median', row => number(row.median), true], ['largest', row => number(row.largest), true],
    ], data.errors));
  section('Compile times',
    ...(data.compile.length === 0 ? [note('No compiled kernel is in the cache.')] : [chart('Compile time of a kernel', () => ({
      type: 'bar',
      data: {labels: data.compile.map(row => row.template), datasets: [
        {label: 'median', data: data.compile.map(row => row.median_ms), backgroundColor: pattern(0),
         borderColor: inks[0], borderWidth: 1},
        {label: 'longest', data: data.compile.map(row => row.longest_ms), backgroundColor: pattern(1),
         borderColor: inks[1], borderWidth: 1}]},
      options: {indexAxis: 'y', scales: {x: axis('ms', {beginAtZero: true})}},
    })),
    table('By template', [
      ['template', row => row.template], ['target', row => row.target],
      ['kernels', row => row.count, true], ['median, ms', row => number(row.median_ms, 1), true],
      ['longest, ms', row => number(row.longest_ms, 1), true],
      ['all, s', row => number(row.total_ms / 1000, 1), true],
    ], data.compile)]));
  section('Failures',
    note(Object.entries(data.statuses).map(([status, count]) => `${count} ${status}`).join(', ') ||
         'Nothing was measured.'),
    data.failures.length === 0 ? note('No config failed.') : table(
      'Configs that failed' + (data.failures_left_out ? `; ${data.failures_left_out} more are left out` : ''), [
      ['status', row => row.status], ['template', row => row.template], ['config', row => row.config],
      ['what happened', row => row.detail], ['problem', row => row.problem], ['when', row => day(row.created)],
    ], data.failures));
}

document.getElementById('summary').textContent =
  `${count(data.problems.length, 'tuned problem')} on ${count(data.devices.length, 'device')}, ` +
  `made ${data.generated}.`;
document.getElementById('charts-note').textContent = hasCharts ? '' :
  'Chart.js was not there when this Wyvern was built (Debian\'s package is libjs-chart.js), so there are tables only.';
provenance();
overview();
problems();
checks();
drawCharts();
document.body.dataset.ready = 'yes';
