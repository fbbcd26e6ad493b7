//! `gruyere export`: all records of a folder as Prometheus metrics.

mod collect;
mod exits;
mod exposition;
mod families;
mod growth;
mod serve;
mod textfile;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use collect::Collector;
use exposition::Format;

use crate::failure::{Ended, Exit, Failure, say};
use crate::output;
use crate::signals::{self, Asked};
use crate::target::Folder;

/// How often a signal is looked for between two writes of the file.
const MOMENT: Duration = Duration::from_millis(100);

/// Serves what all processes of this machine hold as Prometheus metrics.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere export                    serve http://127.0.0.1:9404/metrics
  gruyere export --listen 0.0.0.0:9404
                                    for a Prometheus on another machine; every
                                    host that reaches the port can read it
  gruyere export --textfile /var/lib/prometheus/node-exporter/gruyere.prom
                                    for node_exporter's textfile collector,
                                    every 15 s
  gruyere export --textfile FILE --once
                                    the same from cron or a Slurm epilog
  gruyere export --print | promtool check metrics

Pages: /metrics (Prometheus text, or OpenMetrics where the client accepts it) and /-/healthy.

An exporter covers the processes of its own user; as root with --all-users, those of all users \
(the label `user` marks those of other users). It trusts a record if the file belongs to the user \
whose process the record names. For a process in another container, the file's owner is the only \
evidence (gruyere_exporter_unseen_processes counts these).

In Prometheus, set `honor_labels: true`, so that `job` is the Slurm job or torchrun run, not the \
scrape job. Alert rules and a Grafana dashboard are in dashboards/ of the repository.

Exit codes: 0 written or printed; 1 the folder can't be read, the address is not available, or the \
metrics can't be written; 2 wrong usage. A signal ends serving, and with --textfile removes the \
file.")]
pub struct Arguments {
    /// Address and port to listen on. Any address but loopback is open to every host that can reach
    /// it.
    #[arg(
        long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9404",
        value_parser = serve::address, conflicts_with_all = ["textfile", "print"]
    )]
    listen: String,
    /// Write this file, at once and then every --interval, in place of serving.
    #[arg(long, value_name = "FILE", conflicts_with = "print")]
    textfile: Option<PathBuf>,
    /// With --textfile: write it once, then exit.
    #[arg(long, requires = "textfile", conflicts_with = "interval")]
    once: bool,
    /// With --textfile: seconds between writes.
    #[arg(long, value_name = "SECONDS", requires = "textfile", default_value = "15",
          value_parser = clap::value_parser!(u32).range(1..=86400))]
    interval: u32,
    /// Print the metrics once, then exit.
    #[arg(long)]
    print: bool,
    /// With --print: OpenMetrics in place of Prometheus text.
    #[arg(long, requires = "print")]
    openmetrics: bool,
    /// Value of the label `job` for all processes. Default: the Slurm job or the torchrun run of
    /// each.
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// Export at most this many processes, the newest first; the rest are only counted.
    #[arg(
        long, value_name = "COUNT", default_value = "256",
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    max_processes: u32,
    #[command(flatten)]
    folder: Folder,
}

pub fn run(arguments: &Arguments) -> Ended {
    let mut collector = Collector::new(
        arguments.folder.clone(),
        arguments.job.clone(),
        usize::try_from(arguments.max_processes).unwrap_or(usize::MAX),
    );
    // Reports an unreadable folder at once, not at the first scrape.
    if arguments.print {
        let format = if arguments.openmetrics { Format::OpenMetrics } else { Format::Prometheus };
        output::print(exposition::write(&collector.look()?, format))?;
        return Ok(Exit::Fine);
    }
    if let Some(path) = &arguments.textfile {
        if arguments.once {
            return write(path, &mut collector).map(|()| Exit::Fine);
        }
        // What can't be written at all is not removed either.
        textfile::expect_replaceable(path)?;
        let interval = Duration::from_secs(arguments.interval.into());
        write(path, &mut collector)?;
        let ended = keep(path, &mut collector, interval);
        // node_exporter would serve the last values for ever.
        textfile::remove(path);
        ended?.end();
    }
    collector.begin()?;
    let (listener, at) = serve::listen(&arguments.listen)?;
    say("export", format_args!("serving http://{at}/metrics"));
    if !at.ip().is_loopback() {
        say(
            "export",
            format_args!(
                "{at} is not loopback, as you asked: every host that can reach it can read, \
                 without a password, what processes of this machine hold"
            ),
        );
    }
    serve::serve(&listener, collector)
}

fn write(path: &Path, collector: &mut Collector) -> Result<(), Failure> {
    textfile::write(path, &exposition::write(&collector.look()?, Format::Prometheus))
}

/// Writes `path` again and again, until a signal asks for the end.
fn keep(path: &Path, collector: &mut Collector, interval: Duration) -> Result<Asked, Failure> {
    let asked = signals::finish_first();
    while !asked.is_asked() {
        let began = Instant::now();
        write(path, collector)?;
        while !asked.is_asked() && began.elapsed() < interval {
            std::thread::sleep(MOMENT.min(interval.saturating_sub(began.elapsed())));
        }
    }
    Ok(asked)
}
