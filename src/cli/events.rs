//! `rimrock events`
#![forbid(unsafe_code)]

use super::client::{Arguments, call};
use super::output::{Column, Format, Show, print, print_list};
use super::{Common, Failure};
use serde_json::Value;
use std::time::Duration;

/// How often `--follow` asks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Show what has happened
#[derive(Debug, clap::Args)]
#[command(after_help = "The daemon keeps the latest 4096 events, until it ends.

Examples:
  rimrock events
  rimrock events --since 120 -o json
  rimrock events --follow")]
pub struct Events {
    /// Only what came after the event of this number
    #[arg(long, default_value_t = 0)]
    since: u64,
    /// At most so many, the oldest first
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1000))]
    limit: Option<u64>,
    /// Go on as more happens; with -o json an event is one line
    #[arg(short, long, conflicts_with = "limit")]
    follow: bool,
}

const LIST: &[Column] = &[
    ("NUMBER", "sequence", Show::Plain),
    ("TIME", "time", Show::Time),
    ("KIND", "kind", Show::Plain),
    ("POOL", "pool", Show::Plain),
    ("WHAT", "text", Show::Plain),
];

impl Events {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let ask = |since: u64| {
            call(common, "events_get", Arguments::new().with("since", since).maybe("limit", self.limit))
        };
        if !self.follow {
            let answer = ask(self.since)?;
            say_missed(common.output, &answer)?;
            return print_list(common.output, &answer["events"], LIST);
        }
        let mut since = self.since;
        loop {
            let answer = ask(since)?;
            say_missed(common.output, &answer)?;
            let events = answer["events"].as_array().map_or(&[][..], Vec::as_slice);
            match common.output {
                Format::Json => {
                    let lines: String = events.iter().map(|event| format!("{event}\n")).collect();
                    print(&lines)?;
                }
                Format::Table if events.is_empty() => {}
                Format::Table => print_list(common.output, &answer["events"], LIST)?,
            }
            since = answer["next"].as_u64().unwrap_or(since);
            if events.is_empty() {
                std::thread::sleep(INTERVAL);
            }
        }
    }
}

fn say_missed(format: Format, answer: &Value) -> Result<(), Failure> {
    match answer["missed"].as_u64() {
        Some(missed) if missed > 0 && format == Format::Table => {
            print(&format!("{missed} earlier events are no longer kept\n"))
        }
        _ => Ok(()),
    }
}
