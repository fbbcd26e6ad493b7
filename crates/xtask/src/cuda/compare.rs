//! Whether two declarations of a function agree for the machine: how arguments are passed, and what
//! pointers point to.
//!
//! A handle may be a number on one side and a pointer on the other, and signedness does not matter:
//! they are passed alike.

use super::dwarf::{Field, Kind, Record, Signature, Type};

/// Differences of ours from the header's, a line each. `is_callee`: the header's callers call ours,
/// which may read fewer arguments.
pub fn differences(ours: &Signature, theirs: &Signature, is_callee: bool) -> Vec<String> {
    let (our, their) = (&ours.parameters, &theirs.parameters);
    // A callee that ignores all its arguments has none to compare: on the ABIs that we know, they
    // are the caller's.
    if is_callee && our.is_empty() {
        return Vec::new();
    }
    if our.len() != their.len() {
        return vec![format!("takes {} arguments, in the header {}", our.len(), their.len())];
    }
    let mut found: Vec<_> = our
        .iter()
        .zip(their)
        .enumerate()
        .filter_map(|(index, (our, their))| {
            Some(format!("argument {}: {}", index + 1, difference(our, their)?))
        })
        .collect();
    found.extend(
        result_difference(&ours.result, &theirs.result).map(|what| format!("result: {what}")),
    );
    found
}

/// A result may be wider than the header's: the caller reads the low half of the same register.
fn result_difference(ours: &Type, theirs: &Type) -> Option<String> {
    match (ours, theirs) {
        (Type::Integer(our), Type::Integer(their)) if our >= their => None,
        _ => difference(ours, theirs),
    }
}

/// Difference between passed types, or pointed-to types.
fn difference(ours: &Type, theirs: &Type) -> Option<String> {
    match (ours, theirs) {
        (Type::Nothing, Type::Nothing) | (Type::Unknown, _) | (_, Type::Unknown) => None,
        (Type::Integer(our), Type::Integer(their)) | (Type::Float(our), Type::Float(their))
            if our == their =>
        {
            None
        }
        (Type::Integer(8), Type::Pointer { .. }) | (Type::Pointer { .. }, Type::Integer(8)) => None,
        (Type::Pointer { read_only, to: our }, Type::Pointer { to: their, .. }) => {
            behind_pointers(our, their, *read_only).map(|what| format!("what it points to: {what}"))
        }
        (Type::Record(our), Type::Record(their)) => {
            if our.size != their.size {
                return Some(sizes(our, their));
            }
            fields(our, their)
        }
        _ => Some(format!("{} here, {} in the header", told(ours), told(theirs))),
    }
}

fn behind_pointers(ours: &Type, theirs: &Type, read_only: bool) -> Option<String> {
    match (ours, theirs) {
        // `void *` may point to anything.
        (Type::Nothing, _) | (_, Type::Nothing) => None,
        (Type::Record(our), Type::Record(their)) => {
            // A reader may know only the beginning.
            if our.size == their.size || read_only && our.size < their.size {
                fields(our, their)
            } else {
                Some(sizes(our, their))
            }
        }
        // For example, handles read from an array.
        _ => difference(ours, theirs),
    }
}

fn sizes(ours: &Record, theirs: &Record) -> String {
    format!("{} has {} bytes, {} in the header {}", ours.name, ours.size, theirs.name, theirs.size)
}

/// The first field missing from either, within the length of ours.
fn fields(ours: &Record, theirs: &Record) -> Option<String> {
    let named = |record: &Record, field: &Field| {
        format!("{}.{} ({} bytes at {})", record.name, field.path, field.size, field.offset)
    };
    let of_ours = ours.fields.iter().filter(|field| field.kind != Kind::Bytes);
    if let Some(field) =
        of_ours.clone().find(|field| !theirs.fields.iter().any(|other| covers(other, field)))
    {
        return Some(format!(
            "{} is no field of {} in the header",
            named(ours, field),
            theirs.name
        ));
    }
    let mut of_theirs =
        theirs.fields.iter().filter(|field| field.kind != Kind::Bytes && field.offset < ours.size);
    let unknown = of_theirs.find(|field| !ours.fields.iter().any(|other| covers(other, field)))?;
    Some(format!("{}, a field in the header, is none of {}", named(theirs, unknown), ours.name))
}

/// Whether `field` equals `other`, or lies in bytes for which `other` gives no use.
fn covers(other: &Field, field: &Field) -> bool {
    let same_kind = other.kind == field.kind
        || !matches!((other.kind, field.kind), (Kind::Float, _) | (_, Kind::Float));
    match other.kind {
        Kind::Bytes => {
            other.offset <= field.offset && field.offset + field.size <= other.offset + other.size
        }
        _ => (other.offset, other.size) == (field.offset, field.size) && same_kind,
    }
}

fn told(what: &Type) -> String {
    match what {
        Type::Nothing => "nothing".into(),
        Type::Unknown => "unknown".into(),
        Type::Integer(size) => format!("a number of {size} bytes"),
        Type::Float(size) => format!("a float of {size} bytes"),
        Type::Pointer { .. } => "a pointer".into(),
        Type::Record(record) => format!("{} of {} bytes", record.name, record.size),
    }
}

#[cfg(test)]
mod tests {
    use super::super::header::declarations;
    use super::*;

    /// The differences of `ours` from `theirs`, two declarations of `f` in C.
    fn between(ours: &str, theirs: &str, is_callee: bool) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let [ours, theirs] = [("ours", ours), ("theirs", theirs)].map(|(name, code)| {
            let code = format!("#include <stddef.h>\n{code}\n");
            declarations(&folder.path().join(name), &code, &[], &["f"]).unwrap().functions.remove(0)
        });
        differences(&ours, &theirs, is_callee)
    }

    #[track_caller]
    fn same(ours: &str, theirs: &str) {
        assert_eq!(between(ours, theirs, false), [""; 0], "{ours} against {theirs}");
    }

    #[track_caller]
    fn differ(ours: &str, theirs: &str, what: &str) {
        let found = between(ours, theirs, false);
        assert!(found.iter().any(|line| line.contains(what)), "{ours} against {theirs}: {found:?}");
    }

    const PROP: &str = "typedef struct { int type, handles; struct { int type, id; } where; void \
                        *win; struct \
                        { unsigned char a, b; unsigned short usage; unsigned char rest[4]; } \
                        flags; } Prop;";

    #[test]
    fn what_is_passed_alike_is_the_same() {
        same("int f(void *, size_t);", "enum { A } f(unsigned long, unsigned long long);");
        same("int f(unsigned long);", "int f(struct opaque *);");
        same("int f(unsigned long *);", "int f(struct opaque **);");
        same("int f(char *);", "int f(void *);");
        same("int f(void (*)(int));", "int f(struct opaque *);");
        same("int f(unsigned char (*)[16]);", "struct id { char bytes[16]; }; int f(struct id *);");
        same("struct s { struct { int x; } one; }; int f(struct s);", "int f(int);");
        same(
            "struct p { int kind, types, type, id; unsigned long win; char flags[8]; }; int \
             f(const struct p *);",
            &format!("{PROP} int f(const Prop *);"),
        );
    }

    #[test]
    fn other_counts_and_sizes_of_arguments_differ() {
        differ("int f(int);", "int f(int, int);", "takes 1 arguments, in the header 2");
        differ(
            "int f(unsigned);",
            "int f(size_t);",
            "argument 1: a number of 4 bytes here, a number of 8 bytes",
        );
        differ("int f(int, float);", "int f(int, double);", "argument 2");
        differ("int f(int *);", "int f(size_t *);", "argument 1: what it points to");
        differ(
            "int f(int **);",
            "int f(struct s { int a, b; } **);",
            "argument 1: what it points to: what it points to",
        );
        differ("void f(int);", "int f(int);", "result");
        differ("short f(int);", "int f(int);", "result");
        differ(
            "struct s { long a, b; }; int f(struct s);",
            "struct s { long a, b, c; }; int f(struct s);",
            "16 bytes",
        );
    }

    #[test]
    fn other_fields_differ() {
        let ours = |fields: &str| format!("struct p {{ {fields} }}; int f(const struct p *);");
        let theirs = format!("{PROP} int f(const Prop *);");
        // The same length, with a pointer in place of two numbers.
        differ(&ours("int kind, types; void *where; void *win; char flags[8];"), &theirs, "where");
        differ(
            &ours("int kind, types, type, id; char win[4]; float rest; char flags[8];"),
            &theirs,
            "rest",
        );
        differ(&ours("int kind, types, type, id; void *win, *flags, *more;"), &theirs, "bytes");
        // A hole in place of a field of the header.
        differ(
            &ours("int kind; _Alignas(8) int type; void *win; char flags[8];"),
            &theirs,
            "handles",
        );
    }

    #[test]
    fn only_a_reader_may_know_the_beginning_alone() {
        let theirs = format!("{PROP} int f(const Prop *);");
        same("struct p { int kind, types, type, id; }; int f(const struct p *);", &theirs);
        differ("struct p { int kind, types, type, id; }; int f(struct p *);", &theirs, "16 bytes");
    }

    #[test]
    fn only_who_is_called_may_ignore_its_arguments_and_answer_more() {
        assert_eq!(between("int f(void);", "int f(int, int);", true), [""; 0]);
        differ("int f(void);", "int f(int, int);", "takes 0 arguments");
        assert_eq!(between("unsigned long f(int);", "int f(int);", true), [""; 0]);
    }
}
