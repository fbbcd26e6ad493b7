//! The driver's rules that Gruyère relies on, grouped by the consequence of their failure; and the
//! verdict of the probe's document on them.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::collections::HashMap;

use gruyere::config::Backing;
use serde::Deserialize;
use serde_json::Value;

use super::super::finding::Findings;
use crate::driver_calls::span;

/// The probe's document (tests/gpu/README.md), as far as we read it.
#[derive(Debug, Deserialize)]
pub struct Document {
    facts: HashMap<String, Value>,
    rules: Vec<Rule>,
    prices: Prices,
    broken_cases: Vec<BrokenCase>,
}

#[derive(Debug, Deserialize)]
struct Rule {
    name: String,
    answer: Answer,
    detail: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    True,
    False,
    Unknown,
}

#[derive(Debug, Deserialize)]
struct Prices {
    /// Nanoseconds.
    costs: HashMap<String, f64>,
}

#[derive(Debug, Deserialize)]
struct BrokenCase {
    name: String,
    how: String,
}

impl Document {
    fn number(&self, fact: &str) -> Option<f64> {
        self.facts.get(fact)?.as_f64()
    }

    fn device(&self) -> &str {
        self.facts.get("device").and_then(Value::as_str).unwrap_or("the device")
    }

    fn kernels_run(&self) -> Option<bool> {
        self.number("kernels_run").map(|run| run != 0.0)
    }

    /// Whether this is the stand-in GPU without its tests' kernels: it keeps books of memory, but
    /// no contents that belong to a handle.
    fn keeps_books_only(&self) -> bool {
        self.device().starts_with("Phantom") && self.kernels_run() == Some(false)
    }
}

/// The backing that relies on a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    All,
    /// `backing:stitch`.
    Pages,
    /// `backing:pool`.
    Pools,
}

/// Rules that Gruyère relies on, and the meaning of a false one.
struct Reliance {
    by: By,
    /// Whether the rules are about contents of memory, which the stand-in does not keep.
    is_of_contents: bool,
    rules: &'static [&'static str],
    weight: Weight,
    meaning: &'static str,
}

/// Severity and remedy.
enum Weight {
    Note,
    Warning(&'static str),
    Problem(&'static str),
}

const POOLS_INSTEAD: &str = "GRUYERE_CONF=backing:pool uses the driver's pools, whose pages \
                             Gruyère does not map; and report it with";

const RELIED_ON: &[Reliance] = &[
    Reliance {
        by: By::Pages,
        is_of_contents: true,
        rules: &[
            "contents.of_an_address_are_those_of_its_new_handle",
            "alias.copies_see_fills_in_stream_order",
            "alias.kernels_see_writes_in_stream_order",
            "alias.cached_reads_see_writes_in_stream_order",
            "alias.a_product_sees_writes_in_stream_order",
            "alias.bulk_copies_see_writes_in_stream_order",
            "alias.dependent_launches_see_writes",
            "alias.unmapping_one_keeps_work_through_the_other",
        ],
        weight: Weight::Problem(POOLS_INSTEAD),
        meaning: "pages that have moved would show stale data: do not train with pages that move",
    },
    Reliance {
        by: By::All,
        is_of_contents: false,
        rules: &[
            "capture.global.capture_info_is_answered",
            "capture.global.survives_capture_info",
            "capture.thread_local.capture_info_is_answered",
            "capture.thread_local.survives_capture_info",
            "capture.relaxed.capture_info_is_answered",
            "capture.relaxed.survives_capture_info",
            "beside_capture.stream_id_of_another_is_permitted",
            "beside_capture.survives_stream_id_of_another",
            "beside_capture.survives_capture_info_of_legacy",
            "beside_capture.event_record_on_another_is_permitted",
            "beside_capture.survives_event_record_on_another",
            "beside_capture.survives_event_record_on_legacy",
            "beside_capture.event_query_relaxed_is_permitted",
            "beside_capture.survives_event_query_relaxed",
            "beside_capture.memory_info_relaxed_is_permitted",
            "beside_capture.survives_memory_info_relaxed",
        ],
        weight: Weight::Problem(
            "capture no CUDA graph under Gruyère (torch.compile without mode=\"reduce-overhead\"); \
             and report it with",
        ),
        meaning: "CUDA graphs cannot be captured, at least not while the program allocates",
    },
    Reliance {
        by: By::Pages,
        is_of_contents: false,
        rules: &[
            "beside_capture.create_map_relaxed_is_permitted",
            "beside_capture.survives_create_map_relaxed",
            "beside_capture.map_unmap_release_relaxed_is_permitted",
            "beside_capture.survives_map_unmap_release_relaxed",
        ],
        weight: Weight::Problem(POOLS_INSTEAD),
        meaning: "memory cannot grow while a CUDA graph is captured",
    },
    Reliance {
        by: By::Pools,
        is_of_contents: false,
        rules: &[
            "beside_capture.alloc_async_relaxed_is_permitted",
            "beside_capture.survives_alloc_async_relaxed",
        ],
        weight: Weight::Problem(
            "GRUYERE_CONF=backing:fixed does not use the driver's pools; and report it with",
        ),
        meaning: "memory cannot grow while a CUDA graph is captured",
    },
    Reliance {
        by: By::Pages,
        is_of_contents: false,
        rules: &["granularity.divides_2_mib", "map.second_mapping_of_a_handle_is_accepted"],
        weight: Weight::Warning(POOLS_INSTEAD),
        meaning: "pages cannot move, so more memory is held than needed",
    },
    Reliance {
        by: By::Pages,
        is_of_contents: false,
        rules: &[
            "set_access.over_two_mappings_is_accepted",
            "unmap.two_mappings_at_once_is_accepted",
            "many.20000_handles_are_created",
            "many.all_are_mapped_twice",
        ],
        weight: Weight::Warning(POOLS_INSTEAD),
        meaning: "a large heap needs more driver calls, or stops growing early",
    },
    Reliance {
        by: By::Pages,
        is_of_contents: false,
        rules: &["address_space.its_end_is_out_of_memory"],
        weight: Weight::Note,
        meaning: "when addresses run out (very many live CUDA graphs), Gruyère does not reclaim \
                  any to continue",
    },
    Reliance {
        by: By::Pages,
        is_of_contents: false,
        rules: &["handle_type.posix_is_created", "handle_type.posix_is_exported"],
        weight: Weight::Note,
        meaning: "memory cannot be exported as a file descriptor, so NCCL registers no buffers; \
                  handle_type:auto detects that too",
    },
    Reliance {
        by: By::Pages,
        is_of_contents: false,
        rules: &[
            "waits.create_does_not_wait_for_kernels",
            "waits.map_does_not_wait_for_kernels",
            "waits.set_access_does_not_wait_for_kernels",
            "waits.second_map_does_not_wait_for_kernels",
            "waits.second_set_access_does_not_wait_for_kernels",
            "waits.unmap_does_not_wait_for_kernels",
            "waits.address_reserve_does_not_wait_for_kernels",
            "waits.create_does_not_wait_for_copies",
            "waits.map_does_not_wait_for_copies",
            "waits.set_access_does_not_wait_for_copies",
            "waits.second_map_does_not_wait_for_copies",
            "waits.second_set_access_does_not_wait_for_copies",
            "waits.unmap_does_not_wait_for_copies",
            "waits.address_reserve_does_not_wait_for_copies",
        ],
        weight: Weight::Note,
        meaning: "growing the heap and moving pages make the program wait for the device; \
                  `slack:5%` makes both rarer",
    },
    Reliance {
        by: By::Pools,
        is_of_contents: false,
        rules: &[
            "waits.pool_alloc_new_does_not_wait_for_kernels",
            "waits.pool_alloc_new_does_not_wait_for_copies",
        ],
        weight: Weight::Note,
        meaning: "growing the heap makes the program wait for the device",
    },
    Reliance {
        by: By::All,
        is_of_contents: false,
        rules: &[
            "waits.event_create_does_not_wait_for_kernels",
            "waits.event_create_does_not_wait_for_copies",
            "waits.memory_info_does_not_wait_for_kernels",
            "waits.memory_info_does_not_wait_for_copies",
        ],
        weight: Weight::Note,
        meaning: "allocating makes the program wait for the device now and then",
    },
];

/// The area of the findings.
const AREA: &str = "rules";
/// The most names in a line.
const MOST_NAMES: usize = 3;

/// Judges the probe's document. `backing` is the configured one; `files` is the document's folder.
pub fn examine(findings: &mut Findings, document: &Document, backing: Backing, files: &str) {
    let told: HashMap<&str, &Rule> =
        document.rules.iter().map(|rule| (rule.name.as_str(), rule)).collect();
    let has_pages = document.number("virtual_memory_management") != Some(0.0);
    let relies = |by| match by {
        By::All => true,
        By::Pages => matches!(backing, Backing::Auto | Backing::Stitch) && has_pages,
        By::Pools => backing == Backing::Pool || backing == Backing::Auto && !has_pages,
    };
    let (mut hold, mut differ, mut unknown) = (0, Vec::new(), Vec::new());
    for reliance in RELIED_ON.iter().filter(|reliance| relies(reliance.by)) {
        let mut broken = Vec::new();
        for &name in reliance.rules {
            match told.get(name) {
                Some(rule) if rule.answer == Answer::True => hold += 1,
                Some(rule) if rule.answer == Answer::False => {
                    broken.push(format!("{name} is false ({})", rule.detail));
                }
                _ => unknown.push(name.to_owned()),
            }
        }
        if !broken.is_empty() {
            differ.push((reliance, broken));
        }
    }
    let asked = document.rules.len();
    let seconds = document.number("seconds").unwrap_or(0.0);
    let text = format!(
        "{}: {hold} rules that Gruyère relies on hold ({asked} tested in {seconds:.0} s)",
        document.device()
    );
    findings.ok(AREA, text);
    for (reliance, broken) in differ {
        let text = format!("{}: {}", reliance.meaning, some_of(&broken));
        let with_files = |remedy: &str| format!("{remedy} {files}");
        match reliance.weight {
            _ if reliance.is_of_contents && document.keeps_books_only() => findings.note(
                AREA,
                format!("the stand-in GPU does not keep contents per handle: {}", some_of(&broken)),
            ),
            Weight::Problem(remedy) => findings.problem(AREA, text, with_files(remedy)),
            Weight::Warning(remedy) => findings.warning(AREA, text, with_files(remedy)),
            Weight::Note => findings.note(AREA, text),
        }
    }
    if !unknown.is_empty() {
        let why = if document.kernels_run() == Some(false) { "no kernel runs here; " } else { "" };
        let count = unknown.len();
        findings.note(
            AREA,
            format!("{why}{count} more of these rules are unknown: {}", some_of(&unknown)),
        );
    }
    if !document.broken_cases.is_empty() {
        let cases: Vec<String> = document
            .broken_cases
            .iter()
            .map(|case| format!("{} {}", case.name, case.how))
            .collect();
        findings.warning(
            "probe",
            format!("unfinished cases: {}", some_of(&cases)),
            format!("report it with {files}"),
        );
    }
    prices(findings, &document.prices);
}

/// The first of `items`, and how many more there are.
fn some_of(items: &[String]) -> String {
    let shown = items.iter().take(MOST_NAMES).cloned().collect::<Vec<_>>().join(", ");
    match items.len().saturating_sub(MOST_NAMES) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn prices(findings: &mut Findings, prices: &Prices) {
    let calls = [
        ("create", "creating"),
        ("map", "mapping"),
        ("set_access", "access"),
        ("unmap", "unmapping"),
        ("release", "releasing"),
        ("alloc", "cuMemAlloc"),
        ("free", "cuMemFree"),
    ];
    let told: Vec<String> = calls
        .into_iter()
        .filter_map(|(cost, word)| {
            Some(format!("{word} {}", span(*prices.costs.get(cost)? as u64)))
        })
        .collect();
    if !told.is_empty() {
        findings.ok("prices", format!("of 2 MiB: {}", told.join(", ")));
    }
}
