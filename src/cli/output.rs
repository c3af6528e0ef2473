//! Prints answers: a table for people, JSON for programs.
#![forbid(unsafe_code)]

use super::Failure;
use crate::units::format_size;
use clap::ValueEnum;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use serde_json::Value;
use std::io::{ErrorKind, Write};

/// The form of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Columns for people
    Table,
    /// The daemon's own answer, for programs
    Json,
}

/// How a column shows its value.
#[derive(Debug, Clone, Copy)]
pub enum Show {
    /// As it is.
    Plain,
    /// A number of bytes, in the largest unit that fits.
    Bytes,
    /// Seconds since 1970, as UTC date and time.
    Time,
}

/// One column, or one line of a single object: heading, member, form.
pub type Column = (&'static str, &'static str, Show);

/// Prints text to standard output. What cannot be printed ends the command, but its callers clean up first.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => Failure::unread(),
        _ => Failure::failed(format!("cannot write the answer: {error}"))
            .hint("what was asked for may be done; look before you repeat it"),
    })
}

/// Prints the answer as JSON.
pub fn print_json(value: &Value) -> Result<(), Failure> {
    print(&format!("{value:#}\n"))
}

/// Prints a list of objects.
pub fn print_list(format: Format, value: &Value, columns: &[Column]) -> Result<(), Failure> {
    if format == Format::Json {
        return print_json(value);
    }
    let mut table = bare_table();
    table.set_header(columns.iter().map(|(heading, _, _)| *heading));
    for (at, (_, _, show)) in columns.iter().enumerate() {
        if let (Show::Bytes, Some(column)) = (show, table.column_mut(at)) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for object in value.as_array().map_or(&[][..], Vec::as_slice) {
        table.add_row(columns.iter().map(|(_, member, show)| cell(&object[*member], *show)));
    }
    print(&format!("{}\n", trimmed(&table)))
}

/// Prints one object, a line per member.
pub fn print_object(format: Format, value: &Value, rows: &[Column]) -> Result<(), Failure> {
    if format == Format::Json {
        return print_json(value);
    }
    let mut table = bare_table();
    for (heading, member, show) in rows {
        if !value[*member].is_null() {
            table.add_row([(*heading).to_owned(), cell(&value[*member], *show)]);
        }
    }
    print(&format!("{}\n", trimmed(&table)))
}

/// Prints one sentence, or the answer as JSON.
pub fn print_done(format: Format, value: &Value, sentence: &str) -> Result<(), Failure> {
    match format {
        Format::Json => print_json(value),
        Format::Table => print(&format!("{sentence}\n")),
    }
}

fn bare_table() -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table
}

fn trimmed(table: &Table) -> String {
    // Every cell is padded on both sides; the first column's left side is a margin nobody wants.
    let text = table.to_string();
    let lines: Vec<&str> =
        text.lines().map(|line| line.strip_prefix(' ').unwrap_or(line).trim_end()).collect();
    lines.join("\n")
}

fn cell(value: &Value, show: Show) -> String {
    match (show, value) {
        (_, Value::Null) => "-".to_owned(),
        (Show::Bytes, value) if value.is_u64() => format_size_or_zero(value.as_u64().unwrap_or(0)),
        (Show::Time, value) if value.is_u64() => utc(value.as_u64().unwrap_or(0)),
        (_, Value::Bool(true)) => "yes".to_owned(),
        (_, Value::Bool(false)) => "no".to_owned(),
        (_, Value::String(text)) => text.clone(),
        (_, Value::Array(items)) if items.is_empty() => "-".to_owned(),
        (_, Value::Array(items)) => {
            items.iter().map(|item| cell(item, Show::Plain)).collect::<Vec<_>>().join(", ")
        }
        (_, Value::Object(object)) => match object.get("uri").or(object.get("address")) {
            Some(Value::String(text)) => text.clone(),
            _ => value.to_string(),
        },
        (_, other) => other.to_string(),
    }
}

fn format_size_or_zero(bytes: u64) -> String {
    if bytes == 0 { "0".to_owned() } else { format_size(bytes) }
}

/// `2026-01-31 23:59:59`, by the civil-from-days rule of the proleptic Gregorian calendar.
pub fn utc(seconds: u64) -> String {
    let (days, second) = ((seconds / 86_400) as i64, seconds % 86_400);
    // Days are counted from 0000-03-01, so that the leap day is the last of its year.
    let day = days + 719_468;
    let era = day.div_euclid(146_097);
    let of_era = day.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day_of_month = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day_of_month:02} {hour:02}:{minute:02}:{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_civil_dates() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_400, "2000-02-29 00:00:00"),
            (951_868_799, "2000-02-29 23:59:59"),
            (1_709_164_800, "2024-02-29 00:00:00"),
            (4_107_542_400, "2100-03-01 00:00:00"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }
}
