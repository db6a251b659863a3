//! Text for the user, on stdout and stderr.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process;

/// Prints to stdout. A closed pipe (`| head`) does not stop the work. Any other failure ends the program, since the
/// text is its output.
pub(crate) fn print(text: &impl Display) {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            print_error(&format_args!("cannot write to stdout: {error}"));
            process::exit(2)
        }
        _ => {}
    }
}

/// Prints an error to stderr, on one line.
pub(crate) fn print_error(error: &impl Display) {
    // If stderr is closed, the error cannot be shown.
    let _ = writeln!(io::stderr(), "error: {}", escaped(&error.to_string()));
}

/// Prints a note to stderr, on one line: a remark that is not part of the result.
pub(crate) fn print_note(note: &impl Display) {
    let _ = writeln!(io::stderr(), "note: {}", escaped(&note.to_string()));
}

/// `text` on one line with every character visible. Names of tensors and files may contain control characters,
/// invisible characters, and characters that reverse the direction of text.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        // `escape_debug` escapes what is not printable, and quotes. It does not escape a combining character after
        // another character.
        let after_another = String::from_iter(['x', c]);
        match c {
            '\'' | '"' | '\\' => escaped.push(c),
            _ => escaped.extend(after_another.escape_debug().skip(1)),
        }
    }
    escaped
}
