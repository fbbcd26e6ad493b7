//! The rank that the environment gives a process: by torch's own variables, else by those of an MPI
//! or Slurm launcher. The Python package has the same in python_loader/gruyere/_ranks.py.

/// A process's place in its job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Its rank.
    pub rank: Option<u64>,
    /// Its rank among those of the machine.
    pub local_rank: Option<u64>,
    /// The number of ranks.
    pub world_size: Option<u64>,
}

/// The variables of Open MPI, MVAPICH, MPICH with Intel MPI, and PMIx: rank, local rank, size.
/// Before Slurm's: mpiexec may start its daemons by srun, whose variables the ranks then inherit.
const MPI: [[&str; 3]; 4] = [
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"],
    ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"],
    ["PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"],
    ["PMIX_RANK", "PMIX_LOCAL_RANK", "PMIX_SIZE"],
];

/// From this number on, Slurm's steps are its own: the batch script, the shell of `salloc`. Nothing
/// has started ranks there, although SLURM_PROCID is 0 and SLURM_NTASKS the number asked for.
const SLURMS_OWN: u64 = 0xffff_fff0;

impl Place {
    /// The place by RANK, LOCAL_RANK and WORLD_SIZE.
    pub fn of_torch(variable: &impl Fn(&str) -> Option<String>) -> Place {
        Place::of(variable, ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
    }

    /// The place by a launcher's variables; none where torch's say something else: then the program
    /// has started ranks itself, and the launcher's variables are those of their parent.
    pub fn of_launcher(variable: &impl Fn(&str) -> Option<String>) -> Place {
        let torch = Place::of_torch(variable);
        if torch.rank.is_some() {
            return Place::default();
        }
        let mut places = MPI
            .into_iter()
            // Slurm's srun sets PMIX_RANK too, but no size.
            .filter(|names| names[0] != "PMIX_RANK" || !is_pmix_of_slurm(variable))
            .map(|names| Place::of(variable, names))
            .chain([Place::of_slurm(variable)])
            .filter(|place| place.rank.is_some());
        let Some(mut place) = places.next() else { return Place::default() };
        // srun sets PMI_RANK and PMI_SIZE too, and the local rank by its own name alone.
        for other in places {
            let whole = |place: &Place| (place.rank, place.world_size);
            if place.world_size.is_some() && whole(&place) == whole(&other) {
                place.local_rank = place.local_rank.or(other.local_rank);
            }
        }
        let differs = |own: Option<u64>, theirs: Option<u64>| own.is_some() && own != theirs;
        if differs(torch.world_size, place.world_size)
            || differs(torch.local_rank, place.local_rank)
            || place.world_size.is_some_and(|size| Some(size) <= place.rank)
        {
            return Place::default();
        }
        place
    }

    fn of_slurm(variable: &impl Fn(&str) -> Option<String>) -> Place {
        // A task of srun has a step; the script of sbatch, and what it starts, has none.
        let step = number(variable, "SLURM_STEP_ID").or_else(|| number(variable, "SLURM_STEPID"));
        if step.is_none_or(|step| step >= SLURMS_OWN) {
            return Place::default();
        }
        // SLURM_NTASKS may be the job's.
        let size = number(variable, "SLURM_STEP_NUM_TASKS");
        let place = Place::of(variable, ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"]);
        Place { world_size: size.or(place.world_size), ..place }
    }

    fn of(variable: &impl Fn(&str) -> Option<String>, names: [&str; 3]) -> Place {
        let [rank, local_rank, world_size] = names.map(|name| number(variable, name));
        Place { rank, local_rank, world_size }
    }
}

fn is_pmix_of_slurm(variable: &impl Fn(&str) -> Option<String>) -> bool {
    variable("PMIX_NAMESPACE").is_some_and(|name| name.starts_with("slurm."))
}

fn number(variable: &impl Fn(&str) -> Option<String>, name: &str) -> Option<u64> {
    variable(name)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::Place;

    fn launched(set: &[&str]) -> (Option<u64>, Option<u64>, Option<u64>) {
        let variable = |name: &str| {
            let mut pairs = set.iter().filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        let place = Place::of_launcher(&variable);
        (place.rank, place.local_rank, place.world_size)
    }

    const NONE: (Option<u64>, Option<u64>, Option<u64>) = (None, None, None);
    const OPEN_MPI: [&str; 3] =
        ["OMPI_COMM_WORLD_RANK=5", "OMPI_COMM_WORLD_LOCAL_RANK=1", "OMPI_COMM_WORLD_SIZE=8"];
    const SRUN: [&str; 5] = [
        "SLURM_STEP_ID=0",
        "SLURM_STEP_NUM_TASKS=8",
        "SLURM_NTASKS=8",
        "SLURM_PROCID=5",
        "SLURM_LOCALID=1",
    ];

    #[test]
    fn a_rank_of_an_mpi_or_slurm_launcher_has_a_place() {
        let place = (Some(5), Some(1), Some(8));
        assert_eq!(launched(&OPEN_MPI), place);
        assert_eq!(launched(&["PMI_RANK=5", "PMI_SIZE=8", "MPI_LOCALRANKID=1"]), place);
        assert_eq!(launched(&["PMIX_RANK=5"]), (Some(5), None, None));
        assert_eq!(launched(&SRUN), place);
        assert_eq!(launched(&[&SRUN[..], &["PMI_RANK=5", "PMI_SIZE=8"]].concat()), place);
        let pmix = ["PMIX_NAMESPACE=slurm.pmix.1.0", "PMIX_RANK=5"];
        assert_eq!(launched(&[&SRUN[..], &pmix].concat()), place);
    }

    #[test]
    fn the_launcher_of_the_ranks_comes_before_that_of_its_daemons() {
        // A daemon on each of two nodes.
        let daemon = [
            "SLURM_STEP_ID=0",
            "SLURM_STEP_NUM_TASKS=2",
            "SLURM_NTASKS=8",
            "SLURM_PROCID=1",
            "SLURM_LOCALID=0",
        ];
        let place = (Some(5), Some(1), Some(8));
        assert_eq!(launched(&[&daemon[..], &OPEN_MPI].concat()), place);
        let hydra = [&daemon[..], &["PMI_RANK=1", "PMI_SIZE=8"]].concat();
        assert_eq!(launched(&hydra), (Some(1), None, Some(8)));
        assert_eq!(launched(&[&daemon[..], &["PMIX_RANK=1"]].concat()), (Some(1), None, None));
    }

    #[test]
    fn a_process_that_no_launcher_started_in_a_slurm_job_is_no_rank() {
        let script = ["SLURM_JOB_ID=7", "SLURM_PROCID=0", "SLURM_LOCALID=0", "SLURM_NTASKS=8"];
        assert_eq!(launched(&script), NONE);
        // The steps of a batch script and of an interactive shell.
        for step in ["SLURM_STEP_ID=4294967291", "SLURM_STEPID=4294967290", "SLURM_STEP_ID="] {
            assert_eq!(launched(&[&script[..], &[step]].concat()), NONE, "{step}");
        }
        assert_eq!(launched(&[]), NONE);
    }

    #[test]
    fn a_launchers_place_that_torchs_variables_contradict_is_not_the_ranks() {
        let with = |more: &'static str| launched(&[&SRUN[..], &[more]].concat());
        assert_eq!(with("RANK=2"), NONE);
        assert_eq!(with("WORLD_SIZE=16"), NONE);
        assert_eq!(with("LOCAL_RANK=3"), NONE);
        assert_eq!(with("WORLD_SIZE=8"), (Some(5), Some(1), Some(8)));
        assert_eq!(launched(&["PMI_RANK=2", "PMI_SIZE=2"]), NONE);
    }
}
