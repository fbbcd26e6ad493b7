//! The GPUs of a dry run: the stand-in's properties for each.
//!
//! Memory is the driver's total (`cuMemGetInfo`, torch's `total_memory` and "total capacity"): less
//! than the advertised size, and slightly different from driver to driver. Each figure was printed
//! on such a GPU, at the given address; of several, the table has the smallest. A figure such as
//! "79.10 GiB" stands for the least value that prints so.
//!
//! No source publishes the memory of a CUDA context. It is derived from torch's out-of-memory
//! messages: the process's memory in use, minus PyTorch's allocated and reserved memory. gpus.json
//! has the GPUs; `docs/gpus.md` lists them (`cargo xtask docs` writes its table), with the messages
//! and the rule.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Name on the command line: the model and its advertised GB.
    pub id: String,
    /// The name that `cuDeviceGetName` returns.
    pub name: &'static str,
    /// Compute capability, as in `9.0`.
    pub capability: &'static str,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// The driver's total, bytes.
    pub memory: u64,
    /// Source of the total.
    pub memory_source: &'static str,
    /// Bytes of a context.
    pub context: u64,
    /// Whether the figure is this GPU's; false: an assumption.
    pub context_known: bool,
    /// Source of the context's figure.
    pub context_source: &'static str,
}

/// How the MiB of a context are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Context {
    /// The largest in messages of two programs or more, on this GPU.
    Seen,
    /// From messages on similar GPUs.
    Like,
}

/// A row of gpus.json.
#[derive(Debug, Deserialize)]
struct Known {
    id: &'static str,
    name: &'static str,
    capability: &'static str,
    multiprocessors: u32,
    memory_mib: u64,
    /// What was printed on such a GPU.
    #[cfg(test)]
    printed: &'static str,
    #[cfg(test)]
    source_name: &'static str,
    source: &'static str,
    context_mib: u64,
    context: Context,
}

fn known() -> &'static [Known] {
    static KNOWN: OnceLock<Vec<Known>> = OnceLock::new();
    KNOWN.get_or_init(|| {
        serde_json::from_str(include_str!("gpus.json")).expect("a test has read gpus.json")
    })
}

/// The default GPU.
pub const USUAL: &str = "h100-80";

/// All GPUs, smallest first within each family, in their usual order.
pub fn all() -> Vec<Gpu> {
    known().iter().map(Gpu::from).collect()
}

impl From<&Known> for Gpu {
    fn from(known: &Known) -> Gpu {
        Gpu {
            id: known.id.to_owned(),
            name: known.name,
            capability: known.capability,
            multiprocessors: known.multiprocessors,
            memory: known.memory_mib * MIB,
            memory_source: known.source,
            context: known.context_mib * MIB,
            context_known: known.context == Context::Seen,
            context_source: match known.context {
                Context::Seen => "the largest in torch's out-of-memory messages on this GPU",
                Context::Like => {
                    "assumed: torch's out-of-memory messages on similar GPUs (--context)"
                }
            },
        }
    }
}

/// The GPU named `word`: an id, or the model alone if it has a single size.
///
/// # Errors
/// No GPU or several match; the text lists the choices.
pub fn find(word: &str) -> Result<Gpu, String> {
    let wanted = word.to_lowercase();
    let model = |known: &Known| known.id.rsplit_once('-').map_or(known.id, |parts| parts.0);
    let fits = |known: &&Known| {
        let short = model(known);
        known.id == wanted || short == wanted || short.strip_prefix("rtx") == Some(wanted.as_str())
    };
    let found: Vec<&Known> = known().iter().filter(fits).collect();
    match found.as_slice() {
        [one] => Ok(Gpu::from(*one)),
        [] => Err(format!(
            "{word}: unknown GPU; the known ones are {}; --gb N stands for any other",
            known().iter().map(|known| known.id).collect::<Vec<_>>().join(", ")
        )),
        several => Err(format!(
            "{word}: sold in several sizes; name one of {}",
            several.iter().map(|known| known.id).collect::<Vec<_>>().join(", ")
        )),
    }
}

/// A GPU of `gibibytes` GiB, otherwise like the default.
pub fn of_size(gibibytes: f64) -> Gpu {
    let like = find(USUAL).expect("the usual one is in the table");
    Gpu {
        id: format!("{gibibytes}gb"),
        memory: (gibibytes * GIB as f64) as u64 / MIB * MIB,
        memory_source: "--gb",
        context_known: false,
        context_source: "assumed, as for an H100 (--context)",
        ..like
    }
}

/// The table, for `--gpu list`.
pub fn table() -> String {
    let mut text = format!(
        "{:<17} {:>10} {:>9} {:>4} {:>10}  name\n",
        "gpu", "memory", "context", "SMs", "capability"
    );
    for gpu in all() {
        text += &format!(
            "{:<17} {:>6.2} GiB {:>4} MiB{} {:>3} {:>10}  {}\n",
            gpu.id,
            gpu.memory as f64 / GIB as f64,
            gpu.context / MIB,
            if gpu.context_known { ' ' } else { '?' },
            gpu.multiprocessors,
            gpu.capability,
            gpu.name
        );
    }
    text + "Memory: the driver's total. Context: from torch's out-of-memory messages; ?: from \
            those on\nsimilar GPUs (--context sets it). Sources of all numbers: docs/gpus.md.\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_found_by_its_id_and_by_its_model_where_that_is_one() {
        assert_eq!(find("H100-80").unwrap().multiprocessors, 132);
        assert_eq!(find("h100").unwrap().id, "h100-80");
        assert_eq!(find("4090").unwrap().id, "rtx4090-24");
        assert!(find("a100").unwrap_err().contains("a100-40, a100-80"));
        assert!(find("h99").unwrap_err().contains("--gb N"));
    }

    #[test]
    fn no_gpu_has_more_memory_than_it_is_sold_with() {
        for gpu in all() {
            let sold: u64 = gpu.id.rsplit_once('-').unwrap().1.parse().unwrap();
            // B200 is sold with 180 GB and with 192 GB, of 1000^3 or of 1024^3.
            assert!(gpu.memory <= sold * GIB && gpu.memory * 10 > sold * GIB * 8, "{}", gpu.id);
        }
    }

    /// Rows of docs/gpus.md with `columns` columns, by GPU.
    fn rows(columns: usize) -> Vec<Vec<&'static str>> {
        let cells = |line: &'static str| -> Vec<&'static str> {
            line.trim_matches('|').split('|').map(str::trim).collect()
        };
        let lines = include_str!("../../../../docs/gpus.md").lines();
        let rows = lines.filter(|line| line.starts_with("| `")).map(cells);
        rows.filter(|row| row.len() == columns).collect()
    }

    #[test]
    fn the_docs_table_is_that_of_the_data() {
        let mut table = String::new();
        for row in known() {
            assert!(row.source.starts_with("https://"), "{}", row.id);
            table += &format!(
                "| `{}` | {} | {} | [{}]({}) | {} | {} |\n",
                row.id,
                row.memory_mib,
                row.printed,
                row.source_name,
                row.source,
                row.multiprocessors,
                row.capability
            );
        }
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/gpus.md");
        let text = std::fs::read_to_string(page).unwrap();
        let begin = text.find("| `").expect("the table's first row");
        let end = begin + text[begin..].find("\n\n").expect("the table's end") + 1;
        let fresh = format!("{}{table}{}", &text[..begin], &text[end..]);
        if std::env::var_os("GRUYERE_BLESS").is_some() {
            std::fs::write(page, fresh).unwrap();
        } else {
            assert!(text == fresh, "docs/gpus.md is stale: run `cargo xtask docs`");
        }
    }

    /// The context figures in docs/gpus.md match the messages listed there.
    #[test]
    fn every_context_follows_from_the_messages_in_the_docs() {
        struct Message {
            of: &'static Known,
            mebibytes: f64,
            thread: &'static str,
        }
        let family = |known: &Known| known.capability.replace("10.0", "9.0");
        let mut counted = Vec::new();
        for row in rows(7) {
            let of = known().iter().find(|known| row[0] == format!("`{}`", known.id)).unwrap();
            let gib = |cell: &str| cell.parse::<f64>().unwrap() * 1024.0;
            let (number, unit) = row[3].split_once(' ').unwrap();
            let reserved = gib(number) / if unit == "MiB" { 1024.0 } else { 1.0 };
            let mebibytes = (gib(row[1]) - gib(row[2]) - reserved).round();
            assert_eq!(row[4], mebibytes.to_string(), "{row:?}");
            if row[6].starts_with("yes") {
                assert!(mebibytes <= 1024.0, "{row:?}");
                counted.push(Message { of, mebibytes, thread: row[5] });
            }
        }
        let largest = |of: &Known| {
            let own = counted.iter().filter(|message| message.of.id == of.id);
            own.map(|message| message.mebibytes).reduce(f64::max)
        };
        for known in known() {
            let own: Vec<_> = counted.iter().filter(|one| one.of.id == known.id).collect();
            if own.iter().any(|message| message.thread != own[0].thread) {
                let largest = largest(known).unwrap() as u64;
                assert_eq!(
                    (known.context, known.context_mib),
                    (Context::Seen, largest),
                    "{}",
                    known.id
                );
                continue;
            }
            let like: Vec<_> =
                counted.iter().filter(|one| family(one.of) == family(known)).collect();
            let each = like.iter().map(|one| one.mebibytes / f64::from(one.of.multiprocessors));
            let share = each.reduce(f64::max).unwrap() * f64::from(known.multiprocessors);
            let least = like.iter().map(|one| largest(one.of).unwrap()).reduce(f64::min).unwrap();
            let wanted = (share - 1e-9).ceil().max(least);
            let wanted = (Context::Like, wanted as u64);
            assert_eq!((known.context, known.context_mib), wanted, "{}", known.id);
        }
    }

    #[test]
    fn a_size_makes_a_gpu_like_the_usual_one() {
        let gpu = of_size(23.5);
        assert_eq!((gpu.memory, gpu.capability), (24064 * MIB, "9.0"));
    }
}
