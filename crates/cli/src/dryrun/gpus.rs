//! The GPUs of a dry run: the stand-in's properties for each.
//!
//! Memory is the driver's total (`cuMemGetInfo`, torch's `total_memory` and "total capacity"): less
//! than the advertised size, and slightly different from driver to driver. Each figure was printed
//! on such a GPU, at the given address; of several, the table has the smallest. A figure such as
//! "79.10 GiB" stands for the least value that prints so.
//!
//! No source publishes the memory of a CUDA context. It is derived from torch's out-of-memory
//! messages: the process's memory in use, minus PyTorch's allocated and reserved memory.
//! `docs/gpus.md` lists them all, with the rule; tests compare this table with it.

use serde::Serialize;

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

/// MiB of a context.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Context {
    /// The largest in messages of two programs or more, on this GPU.
    Seen(u64),
    /// From messages on similar GPUs.
    Like(u64),
}
use Context::{Like, Seen};

struct Known {
    id: &'static str,
    name: &'static str,
    capability: &'static str,
    multiprocessors: u32,
    mebibytes: u64,
    context: Context,
    source: &'static str,
}

const fn known(
    id: &'static str,
    name: &'static str,
    capability: &'static str,
    multiprocessors: u32,
    mebibytes: u64,
    context: Context,
    source: &'static str,
) -> Known {
    Known { id, name, capability, multiprocessors, mebibytes, context, source }
}

#[rustfmt::skip] // A table.
const KNOWN: [Known; 29] = [
    known("t4-16", "Tesla T4", "7.5", 40, 14_905, Seen(137),
        "https://github.com/Zheng-Chong/CatVTON/issues/133"),
    known("v100-16", "Tesla V100-SXM2-16GB", "7.0", 80, 16_130, Like(361),
        concat!(
            "https://github.com/ultralytics/yolov3/blob/",
            "0037254bf266285c122649339c898dc7f330255d/README.md")),
    known("v100-32", "Tesla V100-SXM2-32GB", "7.0", 80, 32_487, Like(361),
        "https://github.com/kvcache-ai/ktransformers/issues/526"),
    known("a10-24", "NVIDIA A10", "8.6", 72, 22_515, Like(315),
        concat!(
            "https://github.com/aalanwyr/face2cuda/blob/",
            "9ad81566c5da19bc4950596a37d3820a595b280a/step2cuda/README.md")),
    known("a10g-24", "NVIDIA A10G", "8.6", 80, 22_515, Like(350),
        concat!(
            "https://huggingface.co/PrunaAI/",
            "TinyLlama-TinyLlama_v1.1_math_code-AWQ-4bit-smashed/blame/",
            "88606a0838a3d429297c4e697e40a7c466c248a8/smashed_results.json")),
    known("a30-24", "NVIDIA A30", "8.0", 56, 24_090, Like(501),
        "https://github.com/google/RB-Modulation/issues/5"),
    known("l4-24", "NVIDIA L4", "8.9", 58, 22_482, Like(316),
        "https://github.com/vllm-project/vllm/issues/12539"),
    known("l40-48", "NVIDIA L40", "8.9", 142, 45_369, Seen(573),
        "https://github.com/escontra/gauss_gym/issues/11"),
    known("l40s-48", "NVIDIA L40S", "8.9", 142, 45_481, Seen(522),
        "https://github.com/stepfun-ai/Step-Video-T2V/issues/8"),
    known("a100-40", "NVIDIA A100-SXM4-40GB", "8.0", 108, 40_339, Like(522),
        "https://github.com/bottlerocket-os/bottlerocket/pull/3873"),
    known("a100-80", "NVIDIA A100-SXM4-80GB", "8.0", 108, 81_035, Seen(522),
        "https://github.com/lianqi1008/Control-GIC/issues/6"),
    known("h100-80", "NVIDIA H100 80GB HBM3", "9.0", 132, 80_994, Like(758),
        "https://github.com/Tencent-Hunyuan/HunyuanVideo-Avatar/issues/6"),
    known("h100nvl-94", "NVIDIA H100 NVL", "9.0", 132, 95_227, Like(758),
        "https://github.com/ali-vilab/VACE/issues/56"),
    known("gh200-96", "NVIDIA GH200 480GB", "9.0", 132, 97_152, Like(758),
        "https://github.com/Lightning-AI/litgpt/issues/1892"),
    known("h200-141", "NVIDIA H200", "9.0", 132, 143_156, Like(758),
        concat!(
            "https://github.com/ai-bot-pro/achatbot/blob/",
            "298019b35ebdd32d4ec0daae998b2308099ba77c/deploy/modal/src/llm/vllm/vlm/",
            "skywork_r1v.py")),
    known("b200-180", "NVIDIA B200", "10.0", 148, 182_626, Like(850),
        "https://github.com/pytorch/ao/pull/4002"),
    known("rtx2080ti-11", "NVIDIA GeForce RTX 2080 Ti", "7.5", 68, 10_819, Like(233),
        "https://github.com/vllm-project/vllm/issues/19445"),
    known("rtx3060-12", "NVIDIA GeForce RTX 3060", "8.6", 28, 12_027, Like(210),
        "https://github.com/smy20011/dreambooth-gui/issues/78"),
    known("rtx3080-10", "NVIDIA GeForce RTX 3080", "8.6", 68, 10_010, Like(298),
        "https://github.com/zai-org/CogVideo/issues/34"),
    known("rtx3090-24", "NVIDIA GeForce RTX 3090", "8.6", 82, 24_121, Seen(323),
        "https://github.com/DominikBucko/qwen38-flash-next-2x3090/issues/2"),
    known("rtx4070ti-12", "NVIDIA GeForce RTX 4070 Ti", "8.9", 60, 11_976, Like(327),
        "https://github.com/Kwai-Kolors/Kolors/issues/11"),
    known("rtx4070tisuper-16", "NVIDIA GeForce RTX 4070 Ti SUPER", "8.9", 66, 15_970, Like(359),
        "https://github.com/kinggongzilla/whatsapp-ai-clone/issues/12"),
    known("rtx4090-24", "NVIDIA GeForce RTX 4090", "8.9", 128, 24_049, Seen(696),
        "https://github.com/nv-tlabs/3dgrut/issues/163"),
    known("rtx5080-16", "NVIDIA GeForce RTX 5080", "12.0", 84, 15_847, Like(619),
        "https://github.com/vllm-project/vllm/issues/14452"),
    known("rtx5090-32", "NVIDIA GeForce RTX 5090", "12.0", 170, 32_117, Seen(619),
        "https://github.com/aikitoria/open-gpu-kernel-modules/issues/1"),
    known("a4000-16", "NVIDIA RTX A4000", "8.6", 48, 15_980, Like(210),
        "https://github.com/DengKaiCQ/VGGT-Long/issues/6"),
    known("a6000-48", "NVIDIA RTX A6000", "8.6", 84, 48_670, Like(368),
        "https://github.com/ultralytics/ultralytics/issues/19084"),
    known("rtx6000ada-48", "NVIDIA RTX 6000 Ada Generation", "8.9", 142, 45_492, Like(773),
        "https://github.com/DINGYANB/MTVCrafter/issues/21"),
    known("rtxpro6000-96", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "12.0", 188, 97_245, Like(685),
        "https://github.com/antirez/ds4/issues/431"),
];

/// The default GPU.
pub const USUAL: &str = "h100-80";

/// All GPUs, smallest first within each family, in their usual order.
pub fn all() -> Vec<Gpu> {
    KNOWN.iter().map(Gpu::from).collect()
}

impl From<&Known> for Gpu {
    fn from(known: &Known) -> Gpu {
        Gpu {
            id: known.id.to_owned(),
            name: known.name,
            capability: known.capability,
            multiprocessors: known.multiprocessors,
            memory: known.mebibytes * MIB,
            memory_source: known.source,
            context: MIB
                * match known.context {
                    Seen(mebibytes) | Like(mebibytes) => mebibytes,
                },
            context_known: matches!(known.context, Seen(_)),
            context_source: match known.context {
                Seen(_) => "the largest in torch's out-of-memory messages on this GPU",
                Like(_) => "assumed: torch's out-of-memory messages on similar GPUs (--context)",
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
    let found: Vec<&Known> = KNOWN.iter().filter(fits).collect();
    match found.as_slice() {
        [one] => Ok(Gpu::from(*one)),
        [] => Err(format!(
            "{word}: unknown GPU; the known ones are {}; --gb N stands for any other",
            KNOWN.map(|known| known.id).join(", ")
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
    fn the_docs_have_the_source_of_every_total() {
        let rows = rows(6);
        assert_eq!(rows.len(), KNOWN.len());
        for (row, known) in rows.iter().zip(&KNOWN) {
            assert!(known.source.starts_with("https://"), "{}", known.id);
            assert!(row[3].ends_with(&format!("]({})", known.source)), "{}", known.id);
            let facts = [
                format!("`{}`", known.id),
                known.mebibytes.to_string(),
                known.multiprocessors.to_string(),
                known.capability.to_owned(),
            ];
            assert_eq!([row[0], row[1], row[4], row[5]], facts.each_ref().map(String::as_str));
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
            let of = KNOWN.iter().find(|known| row[0] == format!("`{}`", known.id)).unwrap();
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
        for known in &KNOWN {
            let own: Vec<_> = counted.iter().filter(|one| one.of.id == known.id).collect();
            if own.iter().any(|message| message.thread != own[0].thread) {
                assert_eq!(known.context, Seen(largest(known).unwrap() as u64), "{}", known.id);
                continue;
            }
            let like: Vec<_> =
                counted.iter().filter(|one| family(one.of) == family(known)).collect();
            let each = like.iter().map(|one| one.mebibytes / f64::from(one.of.multiprocessors));
            let share = each.reduce(f64::max).unwrap() * f64::from(known.multiprocessors);
            let least = like.iter().map(|one| largest(one.of).unwrap()).reduce(f64::min).unwrap();
            let wanted = (share - 1e-9).ceil().max(least);
            assert_eq!(known.context, Like(wanted as u64), "{}", known.id);
        }
    }

    #[test]
    fn a_size_makes_a_gpu_like_the_usual_one() {
        let gpu = of_size(23.5);
        assert_eq!((gpu.memory, gpu.capability), (24064 * MIB, "9.0"));
    }
}
