//! Text for the user, on stdout and stderr.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process;

/// Prints to stdout. A reader who has seen enough (`| head`) does not stop the work; any other failure ends
/// the program, since the text is what it was called for.
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
    // If stderr is gone, there is nobody to tell.
    let _ = writeln!(io::stderr(), "error: {}", escaped(&error.to_string()));
}

/// Prints a note to stderr, on one line: something that a result does not show.
pub(crate) fn print_note(note: &impl Display) {
    let _ = writeln!(io::stderr(), "note: {}", escaped(&note.to_string()));
}

/// `text` on one line, all of it to be seen: the names of tensors, and of files, may hold control characters and those
/// that are invisible or turn a text around.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        // `escape_debug` knows what is printable: a combining character after another one. It escapes quotes as well.
        let after_another = String::from_iter(['x', c]);
        match c {
            '\'' | '"' | '\\' => escaped.push(c),
            _ => escaped.extend(after_another.escape_debug().skip(1)),
        }
    }
    escaped
}
