//! A real Prometheus (Debian package `prometheus`) scrapes a real exporter of a live record.
//! `cargo xtask test` runs this and names the folder of the programs in GRUYERE_PROMETHEUS.

#[path = "common/live_record.rs"]
mod live_record;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gruyere_record::calls::DriverCall;
use gruyere_record::sites::NewSite;
use gruyere_record::watch::{Point, forecast};
use gruyere_record::{BlockEntry, DeviceGauge, Record};
use live_record::{Exporter, ask};
use serde_json::Value;

fn program(name: &str) -> PathBuf {
    let folder = std::env::var_os("GRUYERE_PROMETHEUS");
    let folder = folder.expect(
        "GRUYERE_PROMETHEUS names the folder of prometheus and promtool: run `cargo xtask test \
         --only prometheus`",
    );
    Path::new(&folder).join(name)
}

/// A record with every kind of data, also on the origin of memory in the program.
fn record(directory: &Path) -> &'static Record {
    let record = live_record::record(directory);
    let frames = [record.frame("train.py", "step", 42)];
    let site = record.site(&NewSite { frames: &frames, module: "mlp", ..NewSite::default() });
    let (address, size) = (1 << 50, 1 << 20);
    let block =
        BlockEntry { address, size, requested: size, device: 1, site, ..Default::default() };
    record.shard(1, 0).block_insert(&block);
    record
}

fn dashboards() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dashboards")
}

/// Runs promtool; returns its output.
fn promtool(arguments: &[&str], input: Stdio) -> String {
    let output = Command::new(program("promtool"))
        .args(arguments)
        .current_dir(dashboards())
        .stdin(input)
        .output()
        .expect("promtool runs");
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{arguments:?}: {said}");
    said
}

#[test]
fn promtool_has_nothing_to_say_about_the_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    std::thread::sleep(Duration::from_millis(100));
    let mut printed = Command::new(env!("CARGO_BIN_EXE_gruyere"))
        .args(["export", "--print", "--directory"])
        .arg(folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the command runs");
    let said = promtool(&["check", "metrics"], printed.stdout.take().expect("piped").into());
    assert!(printed.wait().expect("it ends").success());
    assert_eq!(said.trim(), "");
    record.close();
}

#[test]
fn the_alert_rules_do_as_their_unit_tests_say() {
    let said = promtool(&["check", "rules", "alerts.yml"], Stdio::null());
    assert!(said.contains("12 rules found"), "{said}");
    let said = promtool(&["test", "rules", "alerts_test.yml"], Stdio::null());
    assert!(said.contains("SUCCESS"), "{said}");
    // Every alert has a test.
    let (rules, tests) = ["alerts.yml", "alerts_test.yml"]
        .map(|name| std::fs::read_to_string(dashboards().join(name)).expect("it is there"))
        .into();
    let alerts: Vec<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert_eq!(alerts.len(), 12, "{alerts:?}");
    for alert in alerts {
        assert!(tests.contains(&format!("alertname: {alert}\n")), "{alert} has no test");
    }
}

/// A Prometheus that scrapes every second, until dropped.
struct Prometheus {
    child: Child,
    address: String,
    _folder: tempfile::TempDir,
}

impl Prometheus {
    fn start(exporter: &str) -> Prometheus {
        let folder = tempfile::tempdir().unwrap();
        let rules = dashboards().join("alerts.yml");
        let config = format!(
            "global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\nrule_files: [{}]\n\
             scrape_configs:\n\
             - job_name: gruyere\n  honor_labels: true\n  static_configs:\n  - targets: \
             [\"{exporter}\"]\n",
            rules.display()
        );
        let file = folder.path().join("prometheus.yml");
        std::fs::write(&file, config).unwrap();
        // A port that was free a moment ago: Prometheus cannot choose one.
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap().to_string();
        drop(free);
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = Command::new(program("prometheus"))
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("prometheus runs");
        let prometheus = Prometheus { child, address, _folder: folder };
        let began = Instant::now();
        while !prometheus.is_ready() {
            let log =
                std::fs::read_to_string(prometheus._folder.path().join("log")).unwrap_or_default();
            assert!(began.elapsed() < Duration::from_secs(60), "prometheus is not ready:\n{log}");
            std::thread::sleep(Duration::from_millis(50));
        }
        prometheus
    }

    /// Whether it answers: it listens earlier.
    fn is_ready(&self) -> bool {
        std::net::TcpStream::connect(&self.address).is_ok()
            && ask(&self.address, b"GET /-/ready HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 200")
    }

    fn get(&self, path: &str) -> Value {
        // HTTP/1.0: neither chunks nor a persistent connection.
        let answer = ask(&self.address, format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes());
        let (_, body) = answer.split_once("\r\n\r\n").expect("a head");
        serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
    }

    /// The current samples of an expression.
    fn query(&self, expression: &str) -> Vec<Value> {
        let escaped: String = expression.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let answer = self.get(&format!("/api/v1/query?query={escaped}"));
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        answer["data"]["result"].as_array().expect("samples").clone()
    }

    /// Waits until an expression has samples.
    fn await_samples(&self, expression: &str) -> Vec<Value> {
        let began = Instant::now();
        loop {
            let samples = self.query(expression);
            if !samples.is_empty() {
                return samples;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "no samples of {expression}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A leaking program: each step leaves a block of a line, and the counters rise.
fn leak(record: &'static Record, stop: &AtomicBool) {
    let frames = [record.frame("losses.py", "keep", 28)];
    let site = record.site(&NewSite { frames: &frames, ..NewSite::default() });
    let mut shard = record.shard(1, 0);
    let mut count = 0u64;
    while !stop.load(Ordering::Relaxed) {
        count += 1;
        let entry = BlockEntry {
            address: (1 << 41) + (count << 20),
            size: 1 << 20,
            requested: 1 << 20,
            lifetime: 2,
            device: 1,
            step: count as u32,
            site,
            ..BlockEntry::default()
        };
        shard.block_insert(&entry);
        record.device(1).set(&[(DeviceGauge::Step, count)]);
        record.device(1).sample((count + 56) << 20);
        record.latency(true, 3000);
        record.latency(false, 2000);
        record.call_times(DriverCall::Create).expect("room").note(2 << 20, 60_000 + 1000 * count);
        record.device(1).set(&[
            (DeviceGauge::DriverCalls, 17 + count),
            (DeviceGauge::LowPhaseBytes, count << 20),
        ]);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// All expressions of the dashboard: of panels and of annotations.
fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(object) => {
            if let Some(Value::String(expression)) = object.get("expr") {
                found.push(expression.clone());
            }
            object.values().for_each(|value| expressions(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

static DASHBOARD: OnceLock<Value> = OnceLock::new();

fn dashboard() -> &'static Value {
    DASHBOARD.get_or_init(|| {
        let text =
            std::fs::read_to_string(dashboards().join("gruyere.json")).expect("the dashboard");
        serde_json::from_str(&text).expect("JSON")
    })
}

#[test]
fn a_real_prometheus_scrapes_the_exporter_and_every_panel_has_data() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let exporter = Exporter::start(folder.path(), &["--job", "llama"]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| leak(record, &stop));
        let prometheus = Prometheus::start(&exporter.address);
        let up = prometheus.await_samples("up == 1");
        assert_eq!(up[0]["metric"]["job"], "gruyere", "the target's own series keep its name");
        // Long enough for rates, the forecast, and lines, which are read every 5 seconds.
        prometheus
            .await_samples("count_over_time(gruyere_out_of_memory_forecast_seconds[1m]) >= 3");
        prometheus.await_samples("gruyere_site_growth_bytes");
        // A GiB at 50 MiB a second, after some seconds of growth.
        let soonest = prometheus.query("min(gruyere_out_of_memory_forecast_seconds)");
        let seconds = number(&soonest[0]);
        assert!((0.0..30.0).contains(&seconds), "{soonest:?}");
        let growth = prometheus.query("gruyere_site_growth_bytes");
        assert_eq!((growth.len(), number(&growth[0])), (1, f64::from(1 << 20)), "{growth:?}");
        assert_eq!(growth[0]["metric"]["line"], "losses.py:28 in keep");
        prometheus.await_samples("ALERTS{alertname=\"GruyereOutOfMemorySoon\"}");
        let peak = prometheus
            .query("gruyere_live_recent_peak_bytes / on (pid) sum by (pid) (gruyere_live_bytes)");
        assert!((number(&peak[0]) - 1.0).abs() < 0.1, "a leak's peak is what is live: {peak:?}");
        let held = prometheus.query("gruyere_reserved_bytes");
        assert_eq!(
            (held.len(), &held[0]["value"][1]),
            (1, &Value::from((112u64 << 20).to_string()))
        );
        assert_eq!(held[0]["metric"]["job"], "llama");
        assert_eq!(held[0]["metric"]["pid"], std::process::id().to_string());
        // Scraped as OpenMetrics, with metadata that only OpenMetrics has.
        let units = prometheus.get("/api/v1/metadata?metric=gruyere_reserved_bytes");
        assert_eq!(units["data"]["gruyere_reserved_bytes"][0]["unit"], "bytes", "{units}");
        let counters = prometheus.get("/api/v1/targets/metadata?metric=gruyere_allocations");
        assert_eq!(counters["data"][0]["type"], "counter", "{counters}");

        let mut found = Vec::new();
        expressions(dashboard(), &mut found);
        assert!(found.len() > 40, "{}", found.len());
        for expression in &found {
            // A Prometheus without our rules has no series of such a name.
            assert!(!expression.contains("gruyere:"), "a recorded rule: {expression}");
            let mut asked = expression.replace("$__rate_interval", "10s");
            for variable in ["$job", "$rank", "$gpu"] {
                asked = asked.replace(variable, ".*");
            }
            assert!(!asked.contains('$'), "an unknown variable: {expression}");
            let samples = prometheus.query(&asked);
            // Nothing runs out of memory meanwhile.
            let may_be_empty = expression.ends_with("> 0");
            assert!(!samples.is_empty() || may_be_empty, "no data: {asked}");
            let numbers = samples.iter().any(|sample| sample["value"][1] != "NaN");
            assert!(numbers || may_be_empty, "not a number: {asked}: {samples:?}");
        }
        for variable in ["job", "gpu"] {
            let values = prometheus
                .get(&format!("/api/v1/label/{variable}/values?match[]=gruyere_device_info"));
            assert_eq!(values["data"].as_array().map(Vec::len), Some(1), "{values}");
        }
        let rules = prometheus.get("/api/v1/rules");
        let groups = rules["data"]["groups"].as_array().expect("groups");
        for rule in groups.iter().flat_map(|group| group["rules"].as_array().into_iter().flatten())
        {
            assert_eq!(rule["health"], "ok", "{rule}");
        }
    });
    record.close();
}

fn number(sample: &Value) -> f64 {
    sample["value"][1].as_str().and_then(|value| value.parse().ok()).expect("a number")
}

/// The exporter's forecasts for a training with a step per second whose leak fills the device in
/// ten minutes, scraped every 15 seconds; `_` before the first forecast.
fn forecasts_of_a_leak_that_kills_in_ten_minutes() -> Vec<String> {
    const MIB: u64 = 1 << 20;
    let capacity = 16_384 * MIB;
    let (base, swing) = (4096 * MIB, 6000 * MIB);
    let a_step = (capacity - base - swing) / 600;
    let mut points = Vec::new();
    let mut looks = Vec::new();
    for quarter in 0..4 * 600u64 {
        let (step, part) = (quarter / 4, quarter % 4);
        let kept = base + step * a_step;
        // Steps differ by their data.
        let high = kept + swing * (1 + part) / 4 - (step * 7919 % 64) * MIB;
        points.push(Point { seconds: quarter as f64 / 4.0, step, low: kept, high, held: high });
        if quarter % 60 == 59 {
            let seconds = forecast(&points, capacity).seconds();
            looks.push(seconds.map_or("_".to_owned(), |seconds| format!("{seconds:.0}")));
        }
    }
    looks
}

#[test]
fn the_alert_fires_minutes_before_a_leak_kills_that_takes_ten_minutes_in_all() {
    let folder = tempfile::tempdir().unwrap();
    let looks = forecasts_of_a_leak_that_kills_in_ten_minutes();
    let alert = |name: &str, severity: &str| {
        format!(
            "      - expr: count(ALERTS{{alertname=\"{name}\",alertstate=\"firing\",\
             severity=\"{severity}\"}})\n        eval_time: 3m\n        \
             exp_samples: [{{ labels: \"{{}}\", value: 1 }}]\n"
        )
    };
    let tests = format!(
        "rule_files: [\"{}\"]\nevaluation_interval: 1m\ntests:\n  - interval: 15s\n    \
         input_series:\n      - series: gruyere_out_of_memory_forecast_seconds{{pid=\"7\", \
         gpu=\"0\"}}\n        values: \"{}\"\n    promql_expr_test:\n{}{}",
        dashboards().join("alerts.yml").display(),
        looks.join(" "),
        alert("GruyereOutOfMemorySoon", "critical"),
        alert("GruyereForecastOutOfMemory", "warning"),
    );
    let file = folder.path().join("leak_test.yml");
    std::fs::write(&file, &tests).unwrap();
    let said = promtool(&["test", "rules", &file.display().to_string()], Stdio::null());
    assert!(said.contains("SUCCESS"), "{said}\n{tests}");
}

/// Ends the leak also if an assertion fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn the_dashboard_begins_with_who_runs_out_soonest_and_who_grows() {
    let panels = dashboard()["panels"].as_array().expect("panels");
    let titles: Vec<&str> = panels.iter().filter_map(|panel| panel["title"].as_str()).collect();
    assert_eq!(titles[1..4], ["Soonest out of memory", "Who grows", "Growth"]);
    // Panels do not overlap.
    let mut taken = std::collections::HashSet::new();
    for panel in panels {
        let [x, y, w, h] =
            ["x", "y", "w", "h"].map(|part| panel["gridPos"][part].as_u64().expect("a number"));
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(cell.0 < 24 && taken.insert(cell), "{}: {cell:?}", panel["title"]);
        }
    }
}

#[test]
fn every_metric_of_the_dashboard_and_the_rules_is_one_that_the_exporter_has() {
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path());
    let stop = AtomicBool::new(false);
    let metrics = std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| leak(record, &stop));
        let began = Instant::now();
        // Some steps until there is a forecast.
        loop {
            let printed = Command::new(env!("CARGO_BIN_EXE_gruyere"))
                .args(["export", "--print", "--directory"])
                .arg(folder.path())
                .output()
                .expect("the command runs");
            let metrics = String::from_utf8(printed.stdout).expect("text");
            if metrics.contains("\ngruyere_out_of_memory_forecast_seconds{") {
                return metrics;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "no forecast:\n{metrics}");
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    let rules = std::fs::read_to_string(dashboards().join("alerts.yml")).expect("the rules");
    let mut texts = vec![rules];
    expressions(dashboard(), &mut texts);
    let word = |character: char| {
        !(character.is_ascii_alphanumeric() || character == '_' || character == ':')
    };
    let mut names = 0;
    for name in
        texts.iter().flat_map(|text| text.split(word)).filter(|name| name.starts_with("gruyere_"))
    {
        names += 1;
        assert!(
            metrics.lines().any(|line| line.split(['{', ' ']).next() == Some(name)),
            "no metric {name}"
        );
    }
    assert!(names > 40, "{names}");
    record.close();
}
