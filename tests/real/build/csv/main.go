// Command csv answers what Go's encoding/csv makes of texts: a JSON string a line on standard input, an answer a line.
// The answer has "error" or "records".
package main

import (
	"bufio"
	"encoding/csv"
	"encoding/json"
	"os"
	"strings"
)

type answer struct {
	Error   string     `json:"error,omitempty"`
	Records [][]string `json:"records"`
}

func main() {
	in := json.NewDecoder(os.Stdin)
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	for {
		var text string
		if in.Decode(&text) != nil {
			return
		}
		reader := csv.NewReader(strings.NewReader(text))
		reader.Comment = '#'
		records, err := reader.ReadAll()
		given := answer{Records: records}
		if err != nil {
			given.Error = err.Error()
		}
		line, _ := json.Marshal(given)
		out.Write(append(line, '\n'))
	}
}
