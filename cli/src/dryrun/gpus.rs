//! The GPUs that a dry run knows: what the stand-in says of itself for each.
//!
//! Memory is what the driver calls the total (`cuMemGetInfo`, torch's `total_memory` and "total
//! capacity"): less than what is sold, and a little different from driver to driver. Where several
//! numbers are in circulation, the smallest is here. Each comes from what somebody printed on such
//! a GPU; capability and multiprocessors are NVIDIA's.
//!
//! What a CUDA context takes beside the allocators is published nowhere. Three numbers are derived
//! from out-of-memory messages of torch's, as what the process has in use, less what PyTorch has
//! allocated and reserved; with lazy loading it grows with the kernels that a program uses.

use serde::Serialize;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What is assumed of a context where nothing is known: the largest that is, rounded up.
pub const ASSUMED_CONTEXT: u64 = 512 * MIB;

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// How it is asked for: the model and the GB that it is sold with.
    pub id: String,
    /// What `cuDeviceGetName` says.
    pub name: &'static str,
    /// Compute capability, as in `9.0`.
    pub capability: &'static str,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes that the driver calls the total.
    pub memory: u64,
    /// Who says so.
    pub memory_source: &'static str,
    /// Bytes of a context; `None`: not known.
    pub context: Option<u64>,
    /// Who says so.
    pub context_source: &'static str,
}

/// Where a total was printed: torch's properties of the device, or its out-of-memory message.
const PROPERTIES: &str = "torch's properties of the device, as printed by a user";
const MESSAGE: &str = "torch's out-of-memory messages, as posted by users";

struct Known {
    id: &'static str,
    name: &'static str,
    capability: &'static str,
    multiprocessors: u32,
    mebibytes: u64,
    source: &'static str,
    context: Option<u64>,
}

const fn known(
    id: &'static str,
    name: &'static str,
    capability: &'static str,
    multiprocessors: u32,
    mebibytes: u64,
    source: &'static str,
    context: Option<u64>,
) -> Known {
    Known { id, name, capability, multiprocessors, mebibytes, source, context }
}

const KNOWN: [Known; 15] = [
    // 14930 MB with ECC; 15079 to 15109 on Colab and others.
    known("t4-16", "Tesla T4", "7.5", 40, 14930, PROPERTIES, None),
    // 16160 MB on newer drivers (ultralytics' notebooks).
    known("v100-16", "Tesla V100-SXM2-16GB", "7.0", 80, 16130, PROPERTIES, None),
    // Of the PCIe card.
    known("v100-32", "Tesla V100-SXM2-32GB", "7.0", 80, 32510, PROPERTIES, None),
    // torch 2.15 nightly on AWS.
    known("a10g-24", "NVIDIA A10G", "8.6", 80, 22587, PROPERTIES, None),
    // 22.03 GiB on GCP's L4. Context: 21.96 GiB in use, 21.65 allocated, 66.83 MiB reserved.
    known("l4-24", "NVIDIA L4", "8.9", 58, 22558, MESSAGE, Some(251)),
    // Paddle's reference.
    known("a100-40", "NVIDIA A100-SXM4-40GB", "8.0", 108, 40536, PROPERTIES, None),
    // 79.15 GiB; 81251 MiB with older drivers. Context: 78.93 GiB in use, 76.28 allocated, 2.14
    // reserved, on a GPU of 79.15 GiB (the message does not name it).
    known("a100-80", "NVIDIA A100-SXM4-80GB", "8.0", 108, 81049, MESSAGE, Some(522)),
    // 79.11 GiB (vllm-project/vllm#27508); 81082 to 81090 MB with others.
    known("h100-80", "NVIDIA H100 80GB HBM3", "9.0", 132, 81008, MESSAGE, None),
    // Modal.
    known("h200-141", "NVIDIA H200", "9.0", 132, 143_156, PROPERTIES, None),
    // 182642 MB on Modal.
    known("b200-180", "NVIDIA B200", "10.0", 148, 182_631, PROPERTIES, None),
    // 24268 MB in transformers' documentation.
    known("rtx3090-24", "NVIDIA GeForce RTX 3090", "8.6", 82, 24259, PROPERTIES, None),
    // 23.64 GiB; 24563 MB under Windows. Context: 23.26 GiB in use, 22.19 allocated, 656.69 MiB
    // reserved, on a GPU of 23.64 GiB (the message does not name it).
    known("rtx4090-24", "NVIDIA GeForce RTX 4090", "8.9", 128, 24207, MESSAGE, Some(440)),
    // 31.34 to 31.39 GiB.
    known("rtx5090-32", "NVIDIA GeForce RTX 5090", "12.0", 170, 32089, MESSAGE, None),
    // dropbox/hqq's kernels' readme.
    known("a6000-48", "NVIDIA RTX A6000", "8.6", 84, 48676, PROPERTIES, None),
    known("l40s-48", "NVIDIA L40S", "8.9", 142, 45589, PROPERTIES, None),
];

/// The one that is meant where none is named.
pub const USUAL: &str = "h100-80";

/// All of them, smallest first within each family as people list them.
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
            context: known.context.map(|mebibytes| mebibytes * MIB),
            context_source: match known.context {
                Some(_) => "derived from an out-of-memory message of torch's on a GPU of this size",
                None => "not known for this GPU",
            },
        }
    }
}

/// The GPU that `word` names: an id, or the model alone where it is sold in one size.
///
/// # Errors
/// There is none, or several: the text names what there is.
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
            "{word}: no such GPU here; there are {}, and --gb N for any other",
            KNOWN.map(|known| known.id).join(", ")
        )),
        several => Err(format!(
            "{word}: sold in several sizes; name one of {}",
            several.iter().map(|known| known.id).collect::<Vec<_>>().join(", ")
        )),
    }
}

/// A GPU of so many GiB that is like the usual one in all else.
pub fn of_size(gibibytes: f64) -> Gpu {
    let like = find(USUAL).expect("the usual one is in the table");
    Gpu {
        id: format!("{gibibytes}gb"),
        memory: (gibibytes * GIB as f64) as u64 / MIB * MIB,
        memory_source: "--gb",
        context: None,
        context_source: "not known for this GPU",
        ..like
    }
}

/// The table, for `--gpu list`.
pub fn table() -> String {
    let mut text = format!(
        "{:<11} {:<24} {:>10} {:>4} {:>10}  {:>9}  memory by\n",
        "gpu", "name", "capability", "SMs", "memory", "context"
    );
    for gpu in all() {
        let context =
            gpu.context.map_or_else(|| "unknown".to_owned(), |size| format!("{} MiB", size / MIB));
        text += &format!(
            "{:<11} {:<24} {:>10} {:>4} {:>6.2} GiB  {:>9}  {}\n",
            gpu.id,
            gpu.name,
            gpu.capability,
            gpu.multiprocessors,
            gpu.memory as f64 / GIB as f64,
            context,
            gpu.memory_source
        );
    }
    text += &format!(
        "Memory: what the driver calls the total. Context: where it is unknown, {} MiB are \
         assumed (--context).\n",
        ASSUMED_CONTEXT / MIB
    );
    text
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

    #[test]
    fn a_size_makes_a_gpu_like_the_usual_one() {
        let gpu = of_size(23.5);
        assert_eq!((gpu.memory, gpu.capability), (24064 * MIB, "9.0"));
    }
}
