//! Schedule of the replays: Gruyère's one after another (the process has a single heap), the models
//! beside them on another core.

use crate::failure::say;
use gruyere::driver::Driver;
use gruyere::driver::cuda::CudaDriver;
use gruyere_replay::bench::{self, BenchError, Contender, Run, Wanted};
use gruyere_replay::trace::Trace;
use indicatif::{ProgressBar, ProgressStyle};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The runs of each trace, in the order of the contenders.
pub type Runs = Vec<Vec<Run>>;

struct Job<'a> {
    trace: &'a Trace,
    contender: &'a Contender,
    place: (usize, usize),
}

/// A queue of jobs shared by the workers.
struct Queue<'a> {
    jobs: Vec<Job<'a>>,
    next: AtomicUsize,
}

impl<'a> Queue<'a> {
    fn take(&self) -> Option<&Job<'a>> {
        self.jobs.get(self.next.fetch_add(1, Ordering::Relaxed))
    }
}

/// Replays every trace through every contender on stand-in GPUs; `timed`: repeats ours alone, timed
/// by the clock.
///
/// # Errors
/// The first failed measurement.
pub fn on_phantom(
    traces: &[Trace],
    contenders: &[Contender],
    wanted: &Wanted,
    timed: bool,
) -> Result<Runs, String> {
    let queue = |ours| {
        let jobs = traces.iter().enumerate().flat_map(|(t, trace)| {
            let ofs = contenders.iter().enumerate().filter(move |(_, c)| c.is_ours() == ours);
            ofs.map(move |(c, contender)| Job { trace, contender, place: (t, c) })
        });
        Queue { jobs: jobs.collect(), next: AtomicUsize::new(0) }
    };
    let (ours, models) = (queue(true), queue(false));
    let bar = progress(ours.jobs.len() * (1 + usize::from(timed)) + models.jobs.len());
    let results =
        Mutex::new(traces.iter().map(|_| vec![None; contenders.len()]).collect::<Vec<_>>());
    let failure = Mutex::new(None);
    let work = |queue: &Queue<'_>| {
        while let Some(job) = queue.take() {
            at(&bar, format!("{} · {}", job.trace.name, job.contender.name()));
            match bench::run(job.trace, job.contender, wanted) {
                Ok(run) => lock(&results)[job.place.0][job.place.1] = Some(run),
                Err(error) => {
                    lock(&failure).get_or_insert(describe(job, &error));
                    return;
                }
            }
            bar.inc(1);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            work(&ours);
            work(&models);
        });
        scope.spawn(|| work(&models));
    });
    if let Some(failure) = lock(&failure).take() {
        return Err(failure);
    }
    // Timed alone: the other core is quiet now.
    for job in ours.jobs.iter().filter(|_| timed) {
        let Contender::Gruyere(conf) = job.contender else { continue };
        at(&bar, format!("{} · {} · time", job.trace.name, job.contender.name()));
        let time =
            bench::ns_per_operation(job.trace, conf).map_err(|error| describe(job, &error))?;
        if let Some(run) = &mut lock(&results)[job.place.0][job.place.1] {
            run.ns_per_operation = Some(time);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(results.into_iter().map(|runs| runs.into_iter().flatten().collect()).collect())
}

/// Replays every trace through Gruyère on a real GPU, once per configuration.
///
/// # Errors
/// The GPU or the library is unusable: the reason.
pub fn on_cuda(traces: &[Trace], confs: &[String]) -> Result<Runs, String> {
    let driver = CudaDriver::load().map_err(|error| format!("--device cuda: {error}"))?;
    let driver: Arc<dyn Driver> = Arc::new(driver);
    let bar = progress(traces.len() * confs.len());
    let mut all = Vec::new();
    for trace in traces {
        let mut runs = Vec::new();
        for conf in confs {
            at(&bar, format!("{} · gruyere {conf}", trace.name));
            let run = bench::run_on_device(trace, driver.clone(), conf);
            runs.push(run.map_err(|error| format!("{}: {error}", trace.name))?);
            bar.inc(1);
        }
        all.push(runs);
    }
    bar.finish_and_clear();
    Ok(all)
}

fn describe(job: &Job<'_>, error: &BenchError) -> String {
    format!("{} on {}: {error}", job.contender.name(), job.trace.name)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prints the current job: beside the bar, or as a line of its own if stderr is not a terminal.
fn at(bar: &ProgressBar, what: String) {
    if bar.is_hidden() {
        let length = bar.length().unwrap_or(0);
        say("bench", format_args!("{} of {length} done; {what}", bar.position()));
    }
    bar.set_message(what);
}

/// A bar on stderr, hidden if stderr is not a terminal.
fn progress(jobs: usize) -> ProgressBar {
    let bar = ProgressBar::new(jobs as u64);
    if let Ok(style) =
        ProgressStyle::with_template("{bar:28.yellow/dim} {pos:>3}/{len} {elapsed:>4} {wide_msg}")
    {
        bar.set_style(style.progress_chars("━╸─"));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
