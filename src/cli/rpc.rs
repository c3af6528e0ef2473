//! `rimrock rpc`: any method, by hand.
#![forbid(unsafe_code)]

use super::client::call_raw;
use super::output::{Format, print, print_json};
use super::{Common, Failure};
use crate::control::table;
use serde_json::Value;

/// Call one method of the control socket and print its result
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rimrock rpc --list
  rimrock rpc pool_list
  rimrock rpc volume_create '{\"name\": \"model\", \"size\": 21474836480}'
  rimrock rpc bdev_get_bdevs")]
pub struct Rpc {
    /// The method
    #[arg(required_unless_present_any = ["list", "reference"])]
    method: Option<String>,
    /// Its parameters, a JSON object
    params: Option<String>,
    /// List the methods this program knows, with their parameters
    #[arg(long, conflicts_with_all = ["method", "reference"])]
    list: bool,
    /// Print the reference page of all methods, in Markdown
    #[arg(long, conflicts_with = "method")]
    reference: bool,
}

impl Rpc {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        if self.reference {
            return print(&table::reference_page());
        }
        let Some(method) = self.method else {
            return print_methods(common.output);
        };
        let params = match &self.params {
            Some(text) => Some(serde_json::from_str::<Value>(text).map_err(|error| {
                Failure::usage(format!("the parameters are not JSON: {error}"))
                    .hint("give one object in single quotes, such as '{\"name\": \"main\"}'")
            })?),
            None => None,
        };
        print_json(&call_raw(common, &method, params)?)
    }
}

fn print_methods(format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return print_json(&table::all().map(|method| method.name).collect());
    }
    for method in table::all() {
        let params: Vec<String> = method
            .params
            .iter()
            .map(|param| if param.required { param.name.to_owned() } else { format!("[{}]", param.name) })
            .collect();
        print(&format!("{} {}\n    {}\n", method.name, params.join(" "), method.summary))?;
    }
    Ok(())
}
