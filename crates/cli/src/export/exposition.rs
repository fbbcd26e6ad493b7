//! The two text formats of metrics: Prometheus 0.0.4, for promtool, node_exporter and all older
//! readers, and OpenMetrics 1.0.
//!
//! They differ in the names of counter families, in units, in infos and in the last line. No
//! maintained crate writes both (docs/decisions/readers.md).
#![deny(unsafe_code, clippy::unwrap_used)]

use std::fmt::Write as _;
use std::sync::Arc;

/// A text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus text format 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// The HTTP content type.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// Format for a client with this `Accept` header: OpenMetrics if the header names it with at
    /// least the weight of plain text.
    pub fn accepted(accept: &str) -> Format {
        let (mut open, mut plain) = (0.0f32, 0.0f32);
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let name = parts.next().unwrap_or("").to_ascii_lowercase();
            let mut quality = 1.0f32;
            let mut known = true;
            for parameter in parts {
                match parameter.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
                    Some(("q", value)) => quality = value.parse().unwrap_or(0.0),
                    Some(("version", value)) if name == "application/openmetrics-text" => {
                        known = value.trim_matches('"') == "1.0.0";
                    }
                    _ => {}
                }
            }
            match name.as_str() {
                "application/openmetrics-text" if known => open = quality.max(open),
                "text/plain" | "text/*" | "*/*" => plain = quality.max(plain),
                _ => {}
            }
        }
        if open > 0.0 && open >= plain { Format::OpenMetrics } else { Format::Prometheus }
    }
}

/// Type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only rises; samples get the suffix `_total`.
    Counter,
    /// Rises and falls.
    Gauge,
    /// Facts as labels; samples get the suffix `_info` and are 1.
    Info,
    /// Counts by upper bound.
    Histogram,
}

impl Kind {
    fn suffix(self) -> &'static str {
        match self {
            Kind::Counter => "_total",
            Kind::Info => "_info",
            Kind::Gauge | Kind::Histogram => "",
        }
    }
}

/// Labels of a sample; samples of a process or a device share theirs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Labels {
    shared: Arc<str>,
    own: Option<(&'static str, &'static str)>,
}

/// Longer values are cut: they come from other processes.
const LONGEST_VALUE: usize = 128;

impl Labels {
    /// These pairs, in order. Omits those without a value, as Prometheus itself would.
    pub fn new(pairs: &[(&str, &str)]) -> Labels {
        let mut text = String::new();
        for (name, value) in pairs.iter().filter(|(_, value)| !value.is_empty()) {
            let comma = if text.is_empty() { "" } else { "," };
            // Writing to a String cannot fail, here and below.
            let _ = write!(text, "{comma}{name}=\"");
            for character in value.chars().take(LONGEST_VALUE) {
                match character {
                    '\\' => text.push_str("\\\\"),
                    '"' => text.push_str("\\\""),
                    '\n' => text.push_str("\\n"),
                    other if other.is_control() => text.push(' '),
                    other => text.push(other),
                }
            }
            text.push('"');
        }
        Labels { shared: text.into(), own: None }
    }

    /// Adds a label whose value needs no escape.
    pub fn with(&self, name: &'static str, value: &'static str) -> Labels {
        Labels { shared: self.shared.clone(), own: Some((name, value)) }
    }

    fn write(&self, out: &mut String, bound: Option<&str>) {
        let own = self.own.map(|(name, value)| format!("{name}=\"{value}\""));
        let bound = bound.map(|bound| format!("le=\"{bound}\""));
        let parts = [Some(&*self.shared), own.as_deref(), bound.as_deref()];
        let parts: Vec<&str> =
            parts.into_iter().flatten().filter(|part| !part.is_empty()).collect();
        if !parts.is_empty() {
            let _ = write!(out, "{{{}}}", parts.join(","));
        }
    }
}

/// Value of a sample.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number.
    Count(u64),
    /// Any other.
    Number(f64),
    /// Counts of values up to each bound, not cumulative; the last bound is infinite. Then the sum
    /// of all values.
    Buckets(Vec<(String, u64)>, f64),
}

/// One sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub labels: Labels,
    pub value: Value,
    /// Creation time (ns since 1970); with the labels, a counter's identity.
    pub born: u64,
}

/// A family of samples.
#[derive(Clone, Debug)]
pub struct Family {
    /// Name without the suffix of its kind.
    pub name: &'static str,
    /// Type of the family.
    pub kind: Kind,
    /// Base unit, which ends the name; empty: none.
    pub unit: &'static str,
    /// A sentence of help.
    pub help: &'static str,
    /// Samples; a family without any is not written.
    pub samples: Vec<Sample>,
}

impl Family {
    /// A family without samples.
    pub fn new(name: &'static str, kind: Kind, unit: &'static str, help: &'static str) -> Family {
        Family { name, kind, unit, help, samples: Vec::new() }
    }
}

/// Writes the families in `format`.
pub fn write(families: &[Family], format: Format) -> String {
    let mut out = String::new();
    for family in families.iter().filter(|family| !family.samples.is_empty()) {
        let (name, suffix, help) = (family.name, family.kind.suffix(), family.help);
        match format {
            Format::Prometheus => {
                let kind = match family.kind {
                    Kind::Counter => "counter",
                    Kind::Gauge | Kind::Info => "gauge",
                    Kind::Histogram => "histogram",
                };
                let _ = write!(out, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}\n");
            }
            Format::OpenMetrics => {
                let kind = match family.kind {
                    Kind::Counter => "counter",
                    Kind::Gauge => "gauge",
                    Kind::Info => "info",
                    Kind::Histogram => "histogram",
                };
                let _ = writeln!(out, "# TYPE {name} {kind}");
                if !family.unit.is_empty() {
                    let _ = writeln!(out, "# UNIT {name} {}", family.unit);
                }
                let _ = writeln!(out, "# HELP {name} {help}");
            }
        }
        for sample in &family.samples {
            write_sample(&mut out, name, suffix, sample);
        }
    }
    if format == Format::OpenMetrics {
        out.push_str("# EOF\n");
    }
    out
}

fn write_sample(out: &mut String, name: &str, suffix: &str, Sample { labels, value, .. }: &Sample) {
    let mut line = |suffix: &str, bound: Option<&str>, value: &str| {
        let _ = write!(out, "{name}{suffix}");
        labels.write(out, bound);
        let _ = writeln!(out, " {value}");
    };
    match value {
        Value::Count(count) => line(suffix, None, &count.to_string()),
        Value::Number(number) => line(suffix, None, &number.to_string()),
        Value::Buckets(buckets, sum) => {
            let mut total = 0u64;
            for (bound, count) in buckets {
                total = total.saturating_add(*count);
                line("_bucket", Some(bound), &total.to_string());
            }
            line("_sum", None, &sum.to_string());
            line("_count", None, &total.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn families() -> Vec<Family> {
        let labels = Labels::new(&[("gpu", "0"), ("job", ""), ("name", "a \"b\"\\\nc\u{1b}[0m")]);
        let sample = |value| Sample { labels: labels.with("pool", "small"), value, born: 0 };
        let mut counter = Family::new("x_allocated_bytes", Kind::Counter, "bytes", "Bytes.");
        counter.samples.push(sample(Value::Count(u64::MAX)));
        let mut info = Family::new("x_build", Kind::Info, "", "What this is.");
        info.samples.push(Sample { labels: Labels::default(), value: Value::Count(1), born: 0 });
        let mut histogram = Family::new("x_size_bytes", Kind::Histogram, "bytes", "Sizes.");
        let buckets = vec![("1.0".to_owned(), 2), ("+Inf".to_owned(), 3)];
        histogram.samples.push(sample(Value::Buckets(buckets, 7.5)));
        vec![counter, info, histogram, Family::new("x_none", Kind::Gauge, "", "Nothing.")]
    }

    #[test]
    fn both_formats_are_written_as_their_specifications_say() {
        let labels = r#"gpu="0",name="a \"b\"\\\nc [0m",pool="small""#;
        let buckets = format!(
            "x_size_bytes_bucket{{{labels},le=\"1.0\"}} 2\n\
             x_size_bytes_bucket{{{labels},le=\"+Inf\"}} 5\n\
             x_size_bytes_sum{{{labels}}} 7.5\nx_size_bytes_count{{{labels}}} 5\n"
        );
        let plain = format!(
            "# HELP x_allocated_bytes_total Bytes.\n# TYPE x_allocated_bytes_total counter\n\
             x_allocated_bytes_total{{{labels}}} 18446744073709551615\n\
             # HELP x_build_info What this is.\n# TYPE x_build_info gauge\nx_build_info 1\n\
             # HELP x_size_bytes Sizes.\n# TYPE x_size_bytes histogram\n{buckets}"
        );
        assert_eq!(write(&families(), Format::Prometheus), plain);
        let open = format!(
            "# TYPE x_allocated_bytes counter\n# UNIT x_allocated_bytes bytes\n# HELP \
             x_allocated_bytes Bytes.\n\
             x_allocated_bytes_total{{{labels}}} 18446744073709551615\n\
             # TYPE x_build info\n# HELP x_build What this is.\nx_build_info 1\n\
             # TYPE x_size_bytes histogram\n# UNIT x_size_bytes bytes\n# HELP x_size_bytes Sizes.\n\
             {buckets}# EOF\n"
        );
        assert_eq!(write(&families(), Format::OpenMetrics), open);
    }

    #[test]
    fn openmetrics_is_for_those_who_name_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;\
                          version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, format) in [
            (prometheus, Format::OpenMetrics),
            ("application/openmetrics-text", Format::OpenMetrics),
            ("application/openmetrics-text; version=\"1.0.0\"; charset=utf-8", Format::OpenMetrics),
            ("application/openmetrics-text;version=0.0.1", Format::Prometheus),
            ("application/openmetrics-text;q=0.2, text/plain", Format::Prometheus),
            ("application/openmetrics-text;q=0", Format::Prometheus),
            ("text/html,*/*;q=0.8", Format::Prometheus),
            (";;=,q=,", Format::Prometheus),
            ("", Format::Prometheus),
        ] {
            assert_eq!(Format::accepted(accept), format, "{accept}");
        }
    }

    #[test]
    fn long_values_are_cut() {
        let labels = Labels::new(&[("host", &"é".repeat(1000))]);
        assert_eq!(labels.shared.chars().count(), LONGEST_VALUE + "host=\"\"".len());
    }
}
