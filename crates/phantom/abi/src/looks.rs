//! The devices' reported GPU: `PHANTOM_NAME`, `PHANTOM_CAPABILITY`, `PHANTOM_MULTIPROCESSORS`.

use crate::owner;

/// End of every name, so that no user takes the device for a GPU. A dry run omits it, since it
/// shows the program the GPU in question.
const MARK: &str = " (stand-in)";

/// Limits that depend on the compute capability.
#[derive(Debug, PartialEq, Eq)]
pub struct Generation {
    pub capability: (i32, i32),
    /// Shared memory of a multiprocessor, KiB.
    shared: i32,
    /// Threads and blocks on a multiprocessor at once.
    pub threads: i32,
    pub blocks: i32,
    /// L2 cache, MiB.
    l2: i32,
}

const fn generation(
    capability: (i32, i32),
    shared: i32,
    threads: i32,
    blocks: i32,
    l2: i32,
) -> Generation {
    Generation { capability, shared, threads, blocks, l2 }
}

/// Shared memory, threads and blocks are those of the CUDA C++ programming guide (section "Compute
/// Capabilities", table "Technical Specifications per Compute Capability"). The cache is that of
/// one GPU of the generation, by NVIDIA's data sheets: V100, T4, A100, A10, Orin, RTX 4090, H100,
/// B200, B300, RTX 5090, GB10.
const GENERATIONS: [Generation; 11] = [
    generation((7, 0), 96, 2048, 32, 6),
    generation((7, 5), 64, 1024, 16, 4),
    generation((8, 0), 164, 2048, 32, 40),
    generation((8, 6), 100, 1536, 16, 6),
    generation((8, 7), 164, 1536, 16, 4),
    generation((8, 9), 100, 1536, 24, 72),
    generation((9, 0), 228, 2048, 32, 50),
    generation((10, 0), 228, 2048, 32, 126),
    generation((10, 3), 228, 2048, 32, 126),
    generation((12, 0), 100, 1536, 24, 96),
    generation((12, 1), 100, 1536, 24, 24),
];

impl Generation {
    fn find(text: &str) -> Option<&'static Self> {
        let (major, minor) = text.split_once('.')?;
        let capability = (major.parse().ok()?, minor.parse().ok()?);
        GENERATIONS.iter().find(|generation| generation.capability == capability)
    }

    /// The number after `sm_`: 90 for 9.0.
    pub fn number(&self) -> i32 {
        self.capability.0 * 10 + self.capability.1
    }

    /// Shared memory of a multiprocessor.
    pub fn shared_bytes(&self) -> i32 {
        self.shared << 10
    }

    /// The part of it for one block: since Ampere the system takes 1 KiB per block.
    pub fn shared_bytes_of_block(&self) -> i32 {
        (self.shared - i32::from(self.capability.0 >= 8)) << 10
    }

    pub fn l2_bytes(&self) -> i32 {
        self.l2 << 20
    }
}

/// The reported properties of all devices.
#[derive(Debug)]
pub struct Looks {
    pub name: String,
    pub generation: &'static Generation,
    pub multiprocessors: i32,
}

impl Looks {
    pub fn from_environment() -> Result<Self, String> {
        let said = |name, usual: &str| std::env::var(name).unwrap_or_else(|_| usual.to_owned());
        Self::parse(
            said("PHANTOM_NAME", "Phantom H100"),
            if owner::is_dry_run() { "" } else { MARK },
            &said("PHANTOM_CAPABILITY", "9.0"),
            &said("PHANTOM_MULTIPROCESSORS", "132"),
        )
    }

    fn parse(
        name: String,
        mark: &str,
        capability: &str,
        multiprocessors: &str,
    ) -> Result<Self, String> {
        // Callers of the driver pass 256 bytes, with a NUL at the end.
        let most = 255 - mark.len();
        if name.is_empty() || name.len() > most {
            return Err(format!("PHANTOM_NAME={name}: 1 to {most} bytes are wanted"));
        }
        let name = name + mark;
        let generation = Generation::find(capability).ok_or_else(|| {
            let known: Vec<_> = GENERATIONS
                .iter()
                .map(|generation| {
                    format!("{}.{}", generation.capability.0, generation.capability.1)
                })
                .collect();
            format!("PHANTOM_CAPABILITY={capability}: known are {}", known.join(", "))
        })?;
        let count = multiprocessors.parse().ok().filter(|count| (1..=1024).contains(count));
        let multiprocessors = count
            .ok_or_else(|| format!("PHANTOM_MULTIPROCESSORS={multiprocessors}: not 1 to 1024"))?;
        Ok(Self { name, generation, multiprocessors })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_that_is_not_known_is_refused_with_those_that_are() {
        let wrong = |name: &str, capability, count| {
            Looks::parse(name.to_owned(), MARK, capability, count).unwrap_err()
        };
        assert!(wrong("x", "9.5", "1").ends_with(
            "known are 7.0, 7.5, 8.0, 8.6, 8.7, 8.9, 9.0, \
                                                  10.0, 10.3, 12.0, 12.1"
        ));
        assert!(wrong("x", "9", "1").contains("PHANTOM_CAPABILITY=9:"));
        assert!(wrong("", "9.0", "1").contains("PHANTOM_NAME"));
        assert!(wrong(&"x".repeat(256), "9.0", "1").contains("PHANTOM_NAME"));
        assert!(wrong("x", "9.0", "0").contains("PHANTOM_MULTIPROCESSORS=0"));
    }

    #[test]
    fn a_name_says_that_it_is_a_stand_ins_and_fits_with_that() {
        let name = |length, mark| Looks::parse("x".repeat(length), mark, "9.0", "1");
        assert_eq!(name(1, MARK).unwrap().name, "x (stand-in)");
        assert_eq!(name(244, MARK).unwrap().name.len(), 255);
        assert!(name(245, MARK).unwrap_err().ends_with("1 to 244 bytes are wanted"));
        assert_eq!(name(255, "").unwrap().name.len(), 255);
    }
}
