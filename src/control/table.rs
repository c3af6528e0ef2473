//! The one table of methods. Dispatch, parameter checks, `rpc_get_methods`, `rpc_get_schema` and the reference page all
//! come from it.
#![forbid(unsafe_code)]

use super::Daemon;
use super::error::RpcError;
use super::methods;
use super::schema::{Kind, Param, Params};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::LazyLock;

/// What a handler gives back.
pub type Answer = Pin<Box<dyn Future<Output = Result<Value, RpcError>>>>;

/// One method.
#[derive(Clone, Copy)]
pub struct Method {
    /// Its name on the wire.
    pub name: &'static str,
    /// One sentence.
    pub summary: &'static str,
    /// Its parameters, in the order of the reference page.
    pub params: &'static [Param],
    /// What it answers, in one sentence.
    pub result: &'static str,
    /// The code behind it. Gets parameters that satisfy `params`.
    pub run: fn(Rc<Daemon>, Params) -> Answer,
}

impl Method {
    /// Whether it changes nothing, so that nobody misses it when its caller is gone. The names say so: a method's verb
    /// is `get`, `list` or `diff`, alone or with what is got.
    pub fn only_reads(&self) -> bool {
        self.name.split('_').any(|word| ["get", "list", "diff"].contains(&word))
    }
}

/// A chapter of the reference page.
pub struct Chapter {
    /// Its heading.
    pub title: &'static str,
    /// A sentence or two on what the chapter's methods have in common.
    pub preface: &'static str,
    /// The methods, in reading order.
    pub methods: &'static [Method],
}

static BY_NAME: LazyLock<BTreeMap<&'static str, &'static Method>> =
    LazyLock::new(|| all().map(|method| (method.name, method)).collect());

/// Every method in the order of the reference page.
pub fn all() -> impl Iterator<Item = &'static Method> {
    methods::CHAPTERS.iter().flat_map(|chapter| chapter.methods)
}

/// The method of that name.
pub fn find(name: &str) -> Option<&'static Method> {
    BY_NAME.get(name).copied()
}

/// The method most likely meant by an unknown name.
pub fn nearest_method(name: &str) -> Option<&'static str> {
    crate::nearest::nearest(name, BY_NAME.keys().copied())
}

/// The reference page, `docs/rpc.md`.
pub fn reference_page() -> String {
    let mut page = String::from(
        "# Control methods\n\n\
         <!-- Written by `rimrock rpc --reference`; a test compares it with the method table. -->\n\n\
         JSON-RPC 2.0 over the control socket: objects back to back, with or without white space between them;\n\
         pipelining, batches and notifications work. Calls of one connection are answered in their order. A\n\
         parameter that is missing, mistyped or unknown is refused with code -32602 and `data.field` and\n\
         `data.reason`; what the appliance refuses has a negative errno as its code. Sizes are bytes.\n",
    );
    for chapter in methods::CHAPTERS {
        let _ = write!(page, "\n## {}\n\n{}\n", chapter.title, chapter.preface);
        for method in chapter.methods {
            let _ = write!(page, "\n### `{}`\n\n{}\n", method.name, method.summary);
            if !method.params.is_empty() {
                page.push_str("\n| parameter | type | | |\n| --- | --- | --- | --- |\n");
                write_rows(&mut page, method.params, "");
            }
            let _ = write!(page, "\nAnswers {}\n", method.result);
        }
    }
    page
}

fn write_rows(page: &mut String, params: &[Param], path: &str) {
    for param in params {
        let need = if param.required { "required" } else { "" };
        let (name, kind) = (param.name, param.kind.describe().replace('|', "\\|"));
        let _ = writeln!(page, "| `{path}{name}` | {kind} | {need} | {} |", param.doc);
        let nested = match param.kind {
            Kind::Object(members) => Some((members, format!("{path}{name}."))),
            Kind::List { of: Kind::Object(members), .. } => Some((*members, format!("{path}{name}[]."))),
            _ => None,
        };
        if let Some((members, path)) = nested {
            write_rows(page, members, &path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_well_formed() {
        let mut names: Vec<&str> = all().map(|method| method.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "two methods share a name");
        for method in all() {
            let plain =
                method.name.bytes().all(|byte| byte.is_ascii_lowercase() || b"_0123456789".contains(&byte));
            assert!(plain, "{}", method.name);
            for text in [method.summary, method.result] {
                assert!(text.ends_with('.'), "{}: {text:?} is not a sentence", method.name);
            }
        }
    }

    #[test]
    fn what_changes_something_is_told_from_what_only_reads() {
        let verbs =
            ["create", "delete", "destroy", "export", "import", "add", "remove", "set", "resize", "rename"];
        for method in all() {
            let changes = method.name.split('_').any(|word| verbs.contains(&word));
            assert!(!(changes && method.only_reads()), "{}", method.name);
        }
        assert!(find("bdev_get_bdevs").is_some_and(Method::only_reads));
        assert!(find("snapshot_diff").is_some_and(Method::only_reads));
    }

    #[test]
    fn every_parameter_is_documented_once() {
        fn walk(method: &str, params: &[Param]) {
            for (at, param) in params.iter().enumerate() {
                assert!(param.doc.ends_with('.'), "{method}.{} has no sentence", param.name);
                assert!(
                    !params[..at].iter().any(|other| other.name == param.name),
                    "{method}.{}",
                    param.name
                );
                match param.kind {
                    Kind::Object(members) => walk(method, members),
                    Kind::List { of: Kind::Object(members), .. } => walk(method, members),
                    _ => {}
                }
            }
        }
        all().for_each(|method| walk(method.name, method.params));
    }

    #[test]
    fn the_reference_page_in_docs_is_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/rpc.md");
        let written = std::fs::read_to_string(path).unwrap_or_default();
        let expected = reference_page();
        assert!(
            written == expected,
            "docs/rpc.md differs from the method table; write it anew with \
             `cargo run -- rpc --reference > docs/rpc.md`"
        );
    }
}
